// Device memory that is allocated with the driver's virtual memory management. Physical
// memory, which other processes may import, is mapped to a range of addresses that the
// devices of this process can access.
#pragma once

#include <cuda.h>

#include <cstdint>
#include <span>
#include <string>

#include "platform/cuda/driver.h"
#include "platform/cuda/owners.h"
#include "platform/error.h"

namespace jax_ub {

struct PhysicalMemoryTraits {
  using Value = CUmemGenericAllocationHandle;
  static void Close(const Driver& driver, Value memory) noexcept {
    driver.MemRelease(memory);
  }
};
using PhysicalMemory = DriverHandle<PhysicalMemoryTraits>;

// ImportMemory and ExportMemory share memory by a handle of the given type. `shareable`
// is the argument of cuMemImportFromShareableHandle or cuMemExportToShareableHandle,
// whose meaning depends on the type. Both throw SystemError.
PhysicalMemory ImportMemory(const Driver& driver,
                            CUmemAllocationHandleType type,
                            void* shareable);
void ExportMemory(const PhysicalMemory& memory,
                  CUmemAllocationHandleType type,
                  void* shareable);

struct DeviceRange {
  CUdeviceptr base = 0;
  size_t size = 0;
  bool operator==(const DeviceRange&) const = default;
};
struct ReservedRangeTraits {
  using Value = DeviceRange;
  static void Close(const Driver& driver, Value range) noexcept {
    driver.MemAddressFree(range.base, range.size);
  }
};
struct MappedRangeTraits {
  using Value = DeviceRange;
  static void Close(const Driver& driver, Value range) noexcept {
    driver.MemUnmap(range.base, range.size);
  }
};

// A range of addresses at which physical memory or a multicast object is mapped.
class Mapping {
 public:
  Mapping() = default;
  // Reserves a range of addresses, maps `memory` there, and lets the devices in
  // `accessed_by` read and write it. The range is aligned to `alignment` bytes, or to
  // the driver's default if `alignment` is 0. Throws SystemError.
  Mapping(const Driver& driver,
          CUmemGenericAllocationHandle memory,
          size_t size_bytes,
          size_t alignment,
          std::span<const CUdevice> accessed_by);

  CUdeviceptr base() const { return reserved_.get().base; }
  int64_t size_bytes() const { return static_cast<int64_t>(reserved_.get().size); }

 private:
  // Declared in this order, so that the destructor unmaps the range before it frees it.
  DriverHandle<ReservedRangeTraits> reserved_;
  DriverHandle<MappedRangeTraits> mapped_;
};

// Returns the error for a heap that does not fit into the free memory of a device. The
// error says what to change. `text` is the error of the driver.
CommunicatorError NoRoom(int64_t size_bytes, const std::string& text);

// Physical memory and the addresses at which this process has mapped it.
class VirtualMemory {
 public:
  VirtualMemory() = default;

  // Allocates uninitialized memory on a device and maps it for the devices in
  // `accessed_by`. Other processes can import it by each handle type in `handle_types`,
  // a mask of CUmemAllocationHandleType. Throws CommunicatorError if the device is out
  // of memory, and SystemError for other errors of the driver.
  static VirtualMemory Create(const Driver& driver,
                              CUdevice device,
                              int64_t size_bytes,
                              unsigned handle_types,
                              std::span<const CUdevice> accessed_by);

  // Maps `size_bytes` of imported memory for the devices in `accessed_by`. Throws
  // SystemError.
  VirtualMemory(PhysicalMemory memory,
                size_t size_bytes,
                std::span<const CUdevice> accessed_by);

  CUdeviceptr base() const { return mapping_.base(); }
  int64_t size_bytes() const { return mapping_.size_bytes(); }
  const PhysicalMemory& memory() const { return memory_; }

 private:
  // Declared in this order, so that the destructor unmaps the memory, then releases it.
  PhysicalMemory memory_;
  Mapping mapping_;
};

}  // namespace jax_ub
