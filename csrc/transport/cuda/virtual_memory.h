// Device memory by the driver's virtual memory management: physical memory, which other
// processes may import, at a range of addresses, which the devices of this one access.
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

// That a device has no room for a heap, and what to change.
CommunicatorError NoRoom(int64_t size_bytes, const std::string& text);

// All throw SystemError.
class VirtualMemory {
 public:
  VirtualMemory() = default;

  // New memory of a device, with handles of these types (a mask of
  // CUmemAllocationHandleType). Holds anything. Throws CommunicatorError when the device
  // has no room.
  static VirtualMemory Create(const Driver& driver,
                              CUdevice device,
                              int64_t size_bytes,
                              unsigned handle_types,
                              std::span<const CUdevice> accessed_by);

  // What another process exported, of this size.
  static VirtualMemory Import(const Driver& driver,
                              CUmemAllocationHandleType type,
                              void* shareable,
                              int64_t size_bytes,
                              std::span<const CUdevice> accessed_by);

  CUdeviceptr base() const { return reserved_.get().base; }
  int64_t size_bytes() const { return static_cast<int64_t>(reserved_.get().size); }
  explicit operator bool() const { return static_cast<bool>(reserved_); }

  void Export(CUmemAllocationHandleType type, void* shareable) const;

 private:
  VirtualMemory(PhysicalMemory memory,
                size_t size_bytes,
                std::span<const CUdevice> accessed_by);

  // Given back in the reverse order.
  PhysicalMemory memory_;
  DriverHandle<ReservedRangeTraits> reserved_;
  DriverHandle<MappedRangeTraits> mapped_;
};

}  // namespace jax_ub
