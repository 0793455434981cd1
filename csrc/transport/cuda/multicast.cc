#include "transport/cuda/multicast.h"

#include <utility>

namespace jax_ub {

namespace {

CUmulticastObjectProp PropertiesOf(const MulticastShape& shape) {
  CUmulticastObjectProp properties = {};
  properties.numDevices = static_cast<unsigned>(shape.num_devices);
  properties.size = shape.heap_bytes;
  properties.handleTypes = shape.handle_types;
  return properties;
}

// Returns the granularity of multicast memory, in bytes. Uses the driver's minimum,
// which is 2 MiB on current GPUs, like the page size of heaps. The granularity that the
// driver recommends is hundreds of MiB, which would waste memory.
size_t GranularityOf(const Driver& driver, const MulticastShape& shape) {
  const CUmulticastObjectProp properties = PropertiesOf(shape);
  size_t granularity = 0;
  Check(driver,
        driver.MulticastGetGranularity(&granularity, &properties,
                                       CU_MULTICAST_GRANULARITY_MINIMUM),
        "cuMulticastGetGranularity");
  return granularity;
}

}  // namespace

void BoundMemoryTraits::Close(const Driver& driver, Value bound) noexcept {
  driver.MulticastUnbind(bound.object, bound.device, 0, bound.size);
}

std::string WhyNoMulticast(const LocalDevices& devices) {
  if (devices.driver().MulticastCreate == nullptr) {
    return "the NVIDIA driver has no cuMulticastCreate of CUDA 12.1";
  }
  for (const Context& context : devices.contexts()) {
    if (context.Attribute(CU_DEVICE_ATTRIBUTE_MULTICAST_SUPPORTED) == 0) {
      return "GPU " + std::to_string(context.device()) + " has no multicast";
    }
  }
  return "";
}

Multicast::Multicast(const MulticastShape& shape,
                     size_t granularity,
                     PhysicalMemory object)
    : granularity_(granularity),
      size_((shape.heap_bytes + granularity - 1) / granularity * granularity),
      object_(std::move(object)) {}

Multicast Multicast::Create(const Driver& driver, const MulticastShape& shape) {
  Multicast made(shape, GranularityOf(driver, shape), {});
  CUmulticastObjectProp properties = PropertiesOf(shape);
  properties.size = made.size_;
  CUmemGenericAllocationHandle object = 0;
  Check(driver, driver.MulticastCreate(&object, &properties), "cuMulticastCreate");
  made.object_ = {driver, object};
  return made;
}

Multicast Multicast::Import(const MulticastShape& shape, PhysicalMemory object) {
  const size_t granularity = GranularityOf(object.driver(), shape);
  return {shape, granularity, std::move(object)};
}

void Multicast::Add(const LocalDevices& devices) {
  const Driver& driver = object_.driver();
  for (const CUdevice device : devices.devices()) {
    Check(driver, driver.MulticastAddDevice(object_.get(), device),
          "cuMulticastAddDevice");
  }
}

void Multicast::Bind(const LocalDevices& devices, const LocalHeaps& heaps) {
  const Driver& driver = object_.driver();
  for (int n = 0; n < devices.num_ranks(); ++n) {
    const CUmemGenericAllocationHandle heap = heaps.virtual_memory(n).memory().get();
    Check(driver, driver.MulticastBindMem(object_.get(), 0, heap, 0, size_, 0),
          "cuMulticastBindMem");
    bound_.emplace_back(
        driver, BoundMemory{object_.get(), devices.context_of(n).device(), size_});
  }
}

void Multicast::Map(const LocalDevices& devices) {
  mapping_ =
      Mapping(object_.driver(), object_.get(), size_, granularity_, devices.devices());
}

void Multicast::FreeAtExit() { static_cast<void>(new Multicast(std::move(*this))); }

}  // namespace jax_ub
