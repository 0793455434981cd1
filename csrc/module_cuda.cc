// The Python module jax_ub._cuda. jax_ub/_cuda.pyi documents it.
#include <nanobind/nanobind.h>
#include <nanobind/stl/map.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/unique_ptr.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <iterator>
#include <map>
#include <memory>
#include <optional>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "ffi/attributes.h"
#include "ffi/cuda/handlers.h"
#include "gemm/cuda/fp8_support.h"
#include "module_bindings.h"
#include "platform/cuda/driver.h"
#include "platform/error.h"
#include "transport/cuda/communicator.h"
#include "transport/cuda/flag_params.h"

namespace nb = nanobind;

namespace {

// Returns the reason why no GPU can be used, such as a missing driver, or nullopt if
// GPUs can be used.
std::optional<std::string> WhyNot() {
  try {
    const jax_ub::Driver& driver = jax_ub::SystemDriver();
    int count = 0;
    jax_ub::Check(driver, driver.DeviceGetCount(&count), "cuDeviceGetCount");
    if (count == 0) return "the NVIDIA driver sees no device: CUDA_VISIBLE_DEVICES?";
    jax_ub::ProcessCublasLt();
    return std::nullopt;
  } catch (const jax_ub::Error& error) {
    return error.what();
  }
}

// Returns the newest CUDA version that the driver supports. 13000 means 13.0.
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
    // The error is ignored. A driver that does not know the attribute leaves
    // `has_multicast` 0.
    int has_multicast = 0;
    driver.DeviceGetAttribute(&has_multicast, CU_DEVICE_ATTRIBUTE_MULTICAST_SUPPORTED,
                              device);
    dict["has_multicast"] = has_multicast != 0;
    devices.append(dict);
  }
  return devices;
}

nb::dict CublasLtOfProcess() {
  const jax_ub::CublasLt& library = jax_ub::ProcessCublasLt();
  nb::dict dict;
  dict["path"] = library.path;
  dict["version"] = library.version;
  return dict;
}

std::optional<std::string> WhyNoFp8(std::pair<int, int> capability,
                                    const std::string& scaled_unit,
                                    size_t cublaslt_version) {
  std::string reason = jax_ub::WhyNoFp8(
      scaled_unit, {capability.first, capability.second}, cublaslt_version);
  return reason.empty() ? std::nullopt : std::optional(std::move(reason));
}

// Returns whether device `from` can access the memory of device `to`, as a matrix
// [from][to].
std::vector<std::vector<bool>> Peers(const std::vector<int>& ordinals) {
  const jax_ub::Driver& driver = jax_ub::SystemDriver();
  std::vector<CUdevice> devices(ordinals.size());
  for (size_t i = 0; i < ordinals.size(); ++i) {
    jax_ub::Check(driver, driver.DeviceGet(&devices[i], ordinals[i]), "cuDeviceGet");
  }
  std::vector<std::vector<bool>> peers;
  for (const CUdevice from : devices) {
    std::vector<bool>& row = peers.emplace_back();
    for (const CUdevice to : devices) {
      int can = 1;
      if (from != to) {
        jax_ub::Check(driver, driver.DeviceCanAccessPeer(&can, from, to),
                      "cuDeviceCanAccessPeer");
      }
      row.push_back(can != 0);
    }
  }
  return peers;
}

std::optional<std::string> WhyNoPeers(const std::vector<int>& ordinals) {
  const auto peers = Peers(ordinals);
  for (size_t from = 0; from < peers.size(); ++from) {
    for (size_t to = 0; to < peers.size(); ++to) {
      if (peers[from][to]) continue;
      return "GPU " + std::to_string(ordinals[from]) +
             " cannot reach the memory of GPU " + std::to_string(ordinals[to]) +
             " (cuDeviceCanAccessPeer)";
    }
  }
  return std::nullopt;
}

// Reads the attributes of a call from a Python dictionary, which the lowering passes to
// WorkspaceBytes.
class PythonAttributes : public jax_ub::AttributeSource {
 public:
  PythonAttributes(jax_ub::Op op, const nb::dict& dict) : op_(op), dict_(dict) {}

  bool Has(const char* name) const override { return dict_.contains(name); }
  int64_t Integer(const char* name) const override { return Get<int64_t>(name); }
  float Float(const char* name) const override { return Get<float>(name); }
  std::string Text(const char* name) const override { return Get<std::string>(name); }
  std::vector<int64_t> Integers(const char* name) const override {
    return Get<std::vector<int64_t>>(name);
  }

 private:
  template <typename T>
  T Get(const char* name) const {
    T value;
    if (!Has(name) || !nb::try_cast(dict_[name], value)) {
      throw std::invalid_argument(jax_ub::AttributeError(op_, name) +
                                  "missing, or of another type");
    }
    return value;
  }

  const jax_ub::Op op_;
  const nb::dict& dict_;
};

using Arrays = std::vector<std::pair<std::string, std::vector<int64_t>>>;

std::vector<jax_ub::Tensor> TensorsOf(const jax_ub::CallAttributes& at,
                                      const Arrays& arrays) {
  std::vector<jax_ub::Tensor> tensors;
  for (const auto& [dtype, dimensions] : arrays) {
    const auto found = std::find_if(
        std::begin(jax_ub::kDTypes), std::end(jax_ub::kDTypes),
        [&](const jax_ub::DTypeInfo& info) { return dtype == info.numpy_name; });
    if (found == std::end(jax_ub::kDTypes)) {
      throw std::invalid_argument("jax_ub." + at.label + ": " + dtype + " is none of " +
                                  jax_ub::DTypeNames(&jax_ub::DTypeInfo::numpy_name));
    }
    tensors.push_back(jax_ub::TensorOf(at, found->dtype, dimensions, nullptr));
  }
  return tensors;
}

int64_t WorkspaceBytes(const std::string& name,
                       const nb::dict& attributes,
                       const Arrays& operands,
                       const Arrays& results) {
  for (const jax_ub::OpInfo& info : jax_ub::kOps) {
    if (info.name != name) continue;
    const auto at =
        jax_ub::ReadAttributes(info.op, PythonAttributes(info.op, attributes));
    jax_ub::RankCall call = {.operands = TensorsOf(at, operands),
                             .results = TensorsOf(at, results)};
    jax_ub::SplitScales(at, call);
    return jax_ub::CudaEngine::WorkspaceBytes(at, call);
  }
  throw nb::value_error(("jax_ub has no op '" + name + "'").c_str());
}

nb::dict Counters() {
  const jax_ub::CudaCounters counters = jax_ub::ProcessCudaEngine().counters();
  nb::dict dict;
  dict["calls"] = jax_ub::CallsByName(counters.calls);
  dict["failed_calls"] = counters.failed_calls;
  dict["heap_bytes"] = counters.heap_bytes;
  return dict;
}

std::map<std::string, std::string> Failures() {
  std::map<std::string, std::string> texts;
  for (const auto& [name, failure] : jax_ub::ProcessCudaEngine().Failures()) {
    texts[name] = jax_ub::TextOf(failure);
  }
  return texts;
}

// An endpoint in Python. It has the heaps of a process, and the socket at which the
// process accepts its peers. `endpoint` is null after `connect` has taken it. The class
// differs in name from the class in module.cc, because nanobind identifies the types of
// both modules by name.
struct HeapEndpoint {
  std::unique_ptr<jax_ub::CudaEndpoint> endpoint;
  jax_ub::PeerAddress address = endpoint->address();
  jax_ub::Capabilities capabilities = endpoint->capabilities();
};

std::unique_ptr<HeapEndpoint> MakeEndpoint(const std::vector<int>& ordinals,
                                           int64_t slots_bytes,
                                           const std::string& host) {
  const nb::gil_scoped_release released;
  return std::unique_ptr<HeapEndpoint>(
      new HeapEndpoint{std::make_unique<jax_ub::CudaEndpoint>(
          jax_ub::SystemDriver(), ordinals, slots_bytes, host, jax_ub::CudaNvls())});
}

class HeapCommunicator {
 public:
  HeapCommunicator(std::shared_ptr<jax_ub::CudaCommunicator> communicator,
                   const std::vector<int64_t>& devices)
      : communicator_(std::move(communicator)) {
    jax_ub::ProcessCudaEngine().Join(communicator_, devices);
  }
  ~HeapCommunicator() {
    // The GIL is released, because Close waits for the devices and for the peers.
    const nb::gil_scoped_release released;
    Close();
  }

  void Close() { jax_ub::ProcessCudaEngine().Leave(communicator_); }
  std::string name() const { return communicator_->name(); }
  std::string sharing_mode() const { return communicator_->sharing_mode(); }
  std::vector<std::pair<std::string, std::string>> fallbacks() const {
    std::vector<std::pair<std::string, std::string>> fallbacks;
    for (const jax_ub::SharingFallback& one : communicator_->fallbacks()) {
      fallbacks.emplace_back(one.mode, one.reason);
    }
    return fallbacks;
  }
  bool has_multicast() const { return communicator_->has_multicast(); }
  int64_t size_bytes() const { return communicator_->size_bytes(); }
  std::optional<std::string> failure() const {
    const std::exception_ptr failure = communicator_->failure();
    if (!failure) return std::nullopt;
    return jax_ub::TextOf(failure);
  }

 private:
  const std::shared_ptr<jax_ub::CudaCommunicator> communicator_;
};

std::unique_ptr<HeapCommunicator> Connect(
    HeapEndpoint& endpoint,
    const std::string& name,
    const std::vector<int64_t>& devices,
    const std::vector<int>& processes,
    int process,
    const std::map<int, std::string>& addresses,
    const std::map<int, uint64_t>& tokens,
    const std::map<int, jax_ub::Capabilities>& capabilities,
    double timeout_s) {
  if (!endpoint.endpoint) throw nb::value_error("the endpoint was used already");
  jax_ub::CheckOneOfEach(devices.size(), processes.size(), "processes");
  const auto peers = jax_ub::PeersOf(addresses, tokens);
  const nb::gil_scoped_release released;
  return std::make_unique<HeapCommunicator>(
      jax_ub::CudaCommunicator::Connect(std::move(endpoint.endpoint),
                                        {processes, process, name}, peers, capabilities,
                                        timeout_s),
      devices);
}

std::unique_ptr<HeapCommunicator> ConnectInProcess(const std::string& name,
                                                   const std::vector<int64_t>& devices,
                                                   const std::vector<int>& ordinals,
                                                   int64_t slots_bytes) {
  jax_ub::CheckOneOfEach(devices.size(), ordinals.size(), "ordinals");
  const nb::gil_scoped_release released;
  return std::make_unique<HeapCommunicator>(
      jax_ub::CudaCommunicator::Make(jax_ub::SystemDriver(), ordinals, slots_bytes,
                                     name, jax_ub::CudaNvls()),
      devices);
}

}  // namespace

NB_MODULE(_cuda, m) {
  // Disables nanobind's warnings about leaks, because modules may still refer to
  // communicators when Python exits.
  nb::set_leak_warnings(false);
  // Converts UnsupportedError to Python's NotImplementedError, which tells the caller
  // that another method may support the call.
  nb::register_exception_translator([](const std::exception_ptr& failure, void*) {
    try {
      std::rethrow_exception(failure);
    } catch (const jax_ub::UnsupportedError& error) {
      PyErr_SetString(PyExc_NotImplementedError, error.what());
    }
  });
  m.attr("xla_ffi_api_version") = nb::cast(jax_ub::XlaFfiApiVersion());
  m.def("set_library_paths", &jax_ub::SetLibraryPaths, nb::arg("directories"));
  m.def("why_not", &WhyNot);
  m.def("driver_version", &DriverVersion);
  m.def("devices", &Devices);
  m.def("cublaslt", &CublasLtOfProcess);
  m.def(
      "may_corrupt_concurrent_gemms",
      [](int major) {
        return jax_ub::MayCorruptConcurrentGemms(jax_ub::ProcessCublasLt(), major);
      },
      nb::arg("major"));
  m.attr("fp8_multiple") = jax_ub::kFp8Multiple;
  m.attr("max_ranks") = jax_ub::kMaxRanks;
  m.def("why_no_fp8", &WhyNoFp8, nb::arg("compute_capability"), nb::arg("scaled_unit"),
        nb::arg("cublaslt_version"));
  m.def(
      "needs_contiguous_fp8",
      [](std::pair<int, int> capability) {
        return jax_ub::NeedsContiguousFp8({capability.first, capability.second});
      },
      nb::arg("compute_capability"));
  m.def("peers", &Peers, nb::arg("ordinals"));
  m.def("why_no_peers", &WhyNoPeers, nb::arg("ordinals"));

  m.def(
      "targets",
      [](bool has_several_devices) {
        return jax_ub::HandlersOf(jax_ub::CudaTargets(has_several_devices));
      },
      nb::arg("has_several_devices"));
  m.def("call_site_type", [] { return jax_ub::TypeOf(jax_ub::TheCudaCallSiteType()); });
  m.def("workspace_bytes", &WorkspaceBytes, nb::arg("op"), nb::arg("attributes"),
        nb::arg("operands"), nb::arg("results"));
  m.def(
      "set_local_devices",
      [](std::map<int, int64_t> devices) {
        jax_ub::ProcessCudaEngine().set_local_devices(std::move(devices));
      },
      nb::arg("devices"));
  m.def(
      "set_timeout_s",
      [](double timeout_s) {
        jax_ub::SetCudaTimeout(jax_ub::CheckedTimeout(timeout_s));
      },
      nb::arg("timeout_s"));
  m.def("set_nvls", &jax_ub::SetCudaNvls, nb::arg("nvls"));
  m.def("counters", &Counters);
  const auto unlocked = nb::call_guard<nb::gil_scoped_release>();
  m.def("failures", &Failures, unlocked);
  m.def(
      "release_in_process", [] { jax_ub::ProcessCudaEngine().ReleaseInProcess(); },
      unlocked);

  nb::class_<HeapEndpoint>(m, "Endpoint")
      .def_prop_ro("address",
                   [](const HeapEndpoint& self) { return self.address.address; })
      .def_prop_ro("token", [](const HeapEndpoint& self) { return self.address.token; })
      .def_ro("capabilities", &HeapEndpoint::capabilities);
  nb::class_<HeapCommunicator>(m, "Communicator")
      .def_prop_ro("name", &HeapCommunicator::name)
      .def_prop_ro("sharing_mode", &HeapCommunicator::sharing_mode)
      .def_prop_ro("fallbacks", &HeapCommunicator::fallbacks)
      .def_prop_ro("has_multicast", &HeapCommunicator::has_multicast)
      .def_prop_ro("size_bytes", &HeapCommunicator::size_bytes)
      .def_prop_ro("failure", &HeapCommunicator::failure, unlocked)
      .def("close", &HeapCommunicator::Close, unlocked);
  m.def("endpoint", &MakeEndpoint, nb::arg("ordinals"), nb::arg("slots_bytes"),
        nb::arg("host"));
  m.def(
      "why_not_connected",
      [](const std::vector<int>& processes,
         const std::map<int, jax_ub::Capabilities>& capabilities) {
        return jax_ub::WhyNotConnected(processes, capabilities);
      },
      nb::arg("processes"), nb::arg("capabilities"));
  m.def("connect", &Connect, nb::arg("endpoint"), nb::kw_only(), nb::arg("name"),
        nb::arg("devices"), nb::arg("processes"), nb::arg("process"),
        nb::arg("addresses"), nb::arg("tokens"), nb::arg("capabilities"),
        nb::arg("timeout_s"));
  m.def("connect_in_process", &ConnectInProcess, nb::kw_only(), nb::arg("name"),
        nb::arg("devices"), nb::arg("ordinals"), nb::arg("slots_bytes"));
}
