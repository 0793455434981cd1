// All ranks' heaps behind one address: what is stored there is stored in each of them,
// what is loaded there is their sum, both made by the NVLink switch (NVLS). Only the
// instructions for it (platform/cuda/instructions.cuh) may use such an address.
//
//   one process   Create
//   the others    Import
//   all           Add(own devices)
//   all agree: the driver blocks whoever binds or maps before all devices were added
//   all           Bind(own heaps), Map
#pragma once

#include <cuda.h>

#include <cstddef>
#include <string>
#include <vector>

#include "platform/cuda/driver.h"
#include "platform/cuda/owners.h"
#include "transport/cuda/capabilities.h"
#include "transport/cuda/sharing.h"
#include "transport/cuda/virtual_memory.h"

namespace jax_ub {

// A device's memory, bound to a multicast object.
struct BoundMemory {
  CUmemGenericAllocationHandle object = 0;
  CUdevice device = 0;
  size_t size = 0;
  bool operator==(const BoundMemory&) const = default;
};
struct BoundMemoryTraits {
  using Value = BoundMemory;
  static void Close(const Driver& driver, Value bound) noexcept;
};

// How a device can take part: "GPU 0 has no multicast", or "".
std::string WhyNoMulticast(const LocalDevices& devices);

// What it is made like, the same in every process.
struct MulticastShape {
  int num_devices = 0;
  size_t heap_bytes = 0;
  unsigned handle_types = 0;  // a mask of CUmemAllocationHandleType
};

// All throw SystemError.
class Multicast {
 public:
  Multicast() = default;
  static Multicast Create(const Driver& driver, const MulticastShape& shape);
  static Multicast Import(const MulticastShape& shape, PhysicalMemory object);

  explicit operator bool() const { return static_cast<bool>(object_); }
  const PhysicalMemory& object() const { return object_; }
  // What stands for the base of every heap; 0: it is not mapped.
  CUdeviceptr base() const { return mapping_.base(); }

  void Add(const LocalDevices& devices);
  void Bind(const LocalDevices& devices, const LocalHeaps& heaps);
  void Map(const LocalDevices& devices);

  // Leaves all to the end of the process: a peer's device may still be using it.
  void FreeAtExit();

 private:
  Multicast(const MulticastShape& shape, size_t granularity, PhysicalMemory object);

  size_t granularity_ = 0;
  size_t size_ = 0;
  // Given back in the reverse order.
  PhysicalMemory object_;
  std::vector<DriverHandle<BoundMemoryTraits>> bound_;
  Mapping mapping_;
};

}  // namespace jax_ub
