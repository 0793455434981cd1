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

// As `shareable` takes or gives handles of that type.
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

// Memory, or a multicast object, at addresses of its own, which devices access. All throw
// SystemError.
class Mapping {
 public:
  Mapping() = default;
  // `alignment`: of the addresses; 0 leaves it to the driver.
  Mapping(const Driver& driver,
          CUmemGenericAllocationHandle memory,
          size_t size_bytes,
          size_t alignment,
          std::span<const CUdevice> accessed_by);

  CUdeviceptr base() const { return reserved_.get().base; }
  int64_t size_bytes() const { return static_cast<int64_t>(reserved_.get().size); }
  explicit operator bool() const { return static_cast<bool>(reserved_); }

 private:
  // Given back in the reverse order.
  DriverHandle<ReservedRangeTraits> reserved_;
  DriverHandle<MappedRangeTraits> mapped_;
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
  VirtualMemory(PhysicalMemory memory,
                size_t size_bytes,
                std::span<const CUdevice> accessed_by);

  CUdeviceptr base() const { return mapping_.base(); }
  int64_t size_bytes() const { return mapping_.size_bytes(); }
  const PhysicalMemory& memory() const { return memory_; }

 private:
  // Given back in the reverse order.
  PhysicalMemory memory_;
  Mapping mapping_;
};

}  // namespace jax_ub
