// A multicast object, which makes the heaps of all ranks accessible at one address. For
// a store to this address, the NVLink switch (NVLS) stores the value in every heap. For
// a load, it returns the sum over all heaps. Only multicast instructions
// (platform/cuda/instructions.cuh) may use the address.
//
//   one process     Create
//   other processes Import
//   all processes   Add(own devices)
//   barrier, because Bind and Map block in the driver until all devices have been added
//   all processes   Bind(own heaps), Map
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

// The heap of one device that is bound to a multicast object. Closing the handle
// unbinds the heap.
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

// Returns why the devices cannot use multicast, such as "GPU 0 has no multicast", or ""
// if they can.
std::string WhyNoMulticast(const LocalDevices& devices);

// The arguments with which a multicast object is created. They must be equal in all
// processes.
struct MulticastShape {
  int num_devices = 0;
  size_t heap_bytes = 0;
  unsigned handle_types = 0;  // a mask of CUmemAllocationHandleType
};

// A multicast object, with the heaps of this process bound to it. All methods throw
// SystemError if the driver reports an error.
class Multicast {
 public:
  static Multicast Create(const Driver& driver, const MulticastShape& shape);
  static Multicast Import(const MulticastShape& shape, PhysicalMemory object);

  const PhysicalMemory& object() const { return object_; }
  // Returns the multicast address of the heaps, or 0 if the object is not mapped.
  CUdeviceptr base() const { return mapping_.base(); }

  void Add(const LocalDevices& devices);
  void Bind(const LocalDevices& devices, const LocalHeaps& heaps);
  void Map(const LocalDevices& devices);

  // Keeps the object until the process exits, because devices of peers may still use
  // it.
  void FreeAtExit();

 private:
  Multicast(const MulticastShape& shape, size_t granularity, PhysicalMemory object);

  size_t granularity_ = 0;
  size_t size_ = 0;
  // Declared in this order, so that the destructor unmaps, then unbinds, then releases
  // the object.
  PhysicalMemory object_;
  std::vector<DriverHandle<BoundMemoryTraits>> bound_;
  Mapping mapping_;
};

}  // namespace jax_ub
