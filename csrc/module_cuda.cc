// The Python module jax_ub._cuda: what jax_ub/_cuda.pyi says, and nothing else.
#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <optional>
#include <string>
#include <vector>

#include "platform/cuda/driver.h"
#include "platform/error.h"

namespace nb = nanobind;

namespace {

// Why no device can be used here; none if one can.
std::optional<std::string> WhyNot() {
  try {
    const jax_ub::Driver& driver = jax_ub::SystemDriver();
    int count = 0;
    jax_ub::Check(driver, driver.DeviceGetCount(&count), "cuDeviceGetCount");
    if (count == 0) return "the NVIDIA driver sees no device: CUDA_VISIBLE_DEVICES?";
    return std::nullopt;
  } catch (const jax_ub::Error& error) {
    return error.what();
  }
}

// Of the CUDA that the driver is for: 13000 is 13.0.
int DriverVersion() {
  const jax_ub::Driver& driver = jax_ub::SystemDriver();
  int version = 0;
  jax_ub::Check(driver, driver.DriverGetVersion(&version), "cuDriverGetVersion");
  return version;
}

nb::list Devices() {
  const jax_ub::Driver& driver = jax_ub::SystemDriver();
  int count = 0;
  jax_ub::Check(driver, driver.DeviceGetCount(&count), "cuDeviceGetCount");
  nb::list devices;
  for (int ordinal = 0; ordinal < count; ++ordinal) {
    CUdevice device = 0;
    jax_ub::Check(driver, driver.DeviceGet(&device, ordinal), "cuDeviceGet");
    char name[256] = {};
    jax_ub::Check(driver, driver.DeviceGetName(name, sizeof(name) - 1, device),
                  "cuDeviceGetName");
    const auto attribute = [&](CUdevice_attribute which) {
      int value = 0;
      jax_ub::Check(driver, driver.DeviceGetAttribute(&value, which, device),
                    "cuDeviceGetAttribute");
      return value;
    };
    size_t memory_bytes = 0;
    jax_ub::Check(driver, driver.DeviceTotalMem(&memory_bytes, device),
                  "cuDeviceTotalMem");
    nb::dict dict;
    dict["ordinal"] = ordinal;
    dict["name"] = std::string(name);
    dict["compute_capability"] =
        nb::make_tuple(attribute(CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR),
                       attribute(CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR));
    dict["num_sms"] = attribute(CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT);
    dict["num_copy_engines"] = attribute(CU_DEVICE_ATTRIBUTE_ASYNC_ENGINE_COUNT);
    dict["memory_bytes"] = memory_bytes;
    devices.append(dict);
  }
  return devices;
}

}  // namespace

NB_MODULE(_cuda, m) {
  m.def("why_not", &WhyNot);
  m.def("driver_version", &DriverVersion);
  m.def("devices", &Devices);
}
