// The memory of the emulated devices, in one range of addresses that is reserved once.
// Addresses are never reused, so that accesses to freed memory are detected.
//
// The memory is backed by memory files, which other processes can map.
#pragma once

#include <atomic>
#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <thread>
#include <vector>

#include "platform/file_descriptor.h"

namespace jax_ub::emulated {

inline constexpr int64_t kGranularity = int64_t{2} << 20;

// Memory that an operation reads or writes: rows of bytes.
struct Touch {
  uint64_t address = 0;
  int64_t num_rows = 1;
  int64_t row_bytes = 0;
  int64_t stride_bytes = 0;
  bool by_multicast = false;  // at every device, by an address that stands for all

  // Returns the number of bytes from the first one to the last one.
  int64_t span_bytes() const {
    return num_rows <= 0 || row_bytes <= 0 ? 0
                                           : (num_rows - 1) * stride_bytes + row_bytes;
  }
};

// A memory file that represents memory of one GPU of the machine. Other processes find
// it by the text from `Describe` while it is open in this process.
struct MemoryFile {
  FileDescriptor descriptor;
  int gpu = 0;
  int64_t size_bytes = 0;
  uint64_t id = 0;
  bool is_own = false;  // made by this process

  // Creates a file of which the first part is filled with 0xFF.
  static std::shared_ptr<MemoryFile> Make(int gpu, int64_t size_bytes);
  // Opens the file of a descriptor from another process; nullptr if it is not such a
  // file.
  static std::shared_ptr<MemoryFile> Open(int descriptor);
  // Opens the file that process `pid` has open as `descriptor`, if its id is `id`.
  static std::shared_ptr<MemoryFile> Find(int pid, int descriptor, uint64_t id);
};

// A multicast object, with the memory files that any process has bound to it.
struct Team {
  static constexpr int kMaxDevices = 16;
  struct Bound {
    int gpu = 0;
    uint64_t file = 0;  // its id
    int64_t size_bytes = 0;
  };
  // The part in shared memory, which all processes access under a lock.
  struct Shared {
    std::atomic<int> locked{0};
    int num_devices = 0;
    int64_t size_bytes = 0;
    int num_added = 0;
    int gpus[kMaxDevices] = {};
    int num_bound = 0;
    Bound bound[kMaxDevices] = {};
  };

  FileDescriptor descriptor;
  uint64_t id = 0;
  Shared* shared = nullptr;

  Team() = default;
  Team(const Team&) = delete;
  ~Team();

  static std::shared_ptr<Team> Make(int num_devices, int64_t size_bytes);
  // As the functions of MemoryFile.
  static std::shared_ptr<Team> Open(int descriptor);
  static std::shared_ptr<Team> Find(int pid, int descriptor, uint64_t id);

  // Runs `body` on the shared part, under the lock.
  template <typename Body>
  auto Locked(const Body& body) {
    while (shared->locked.exchange(1, std::memory_order_acquire) != 0) {
      std::this_thread::yield();
    }
    const auto result = body(*shared);
    shared->locked.store(0, std::memory_order_release);
    return result;
  }
};

// A range of addresses to which memory is mapped.
struct Region {
  enum class Kind { kDevice, kHost, kVirtual, kIpc };

  Kind kind = Kind::kDevice;
  uint64_t address = 0;
  int64_t size_bytes = 0;    // as asked for
  int64_t mapped_bytes = 0;  // whole pages
  int device = -1;           // ordinal of the owner's, or of the one that opened it
  std::set<int> accessible;  // kVirtual: to these devices
  std::shared_ptr<MemoryFile> file;
  std::shared_ptr<Team> team;  // kVirtual, in place of a file: nothing is mapped
  int num_uses = 0;            // by operations that are not done

  Region() = default;
  Region(const Region&) = delete;
  ~Region();  // unmaps
};
using SharedRegion = std::shared_ptr<Region>;

class Memory {
 public:
  using Regions = std::map<uint64_t, SharedRegion>;

  // Reserves aligned addresses, with a gap after them; returns 0 if none are left.
  static uint64_t Reserve(int64_t size_bytes, int64_t alignment);
  static bool Holds(uint64_t address);

  // Maps the file at the region's address, with or without access.
  void Add(SharedRegion region, bool is_accessible);
  // Returns the region that begins at an address, if it is of this kind.
  SharedRegion Find(uint64_t address, Region::Kind kind) const;
  // Returns the region that contains an address; nullptr: there is none.
  SharedRegion Around(uint64_t address) const;
  // Returns a region that maps a file; nullptr: there is none.
  SharedRegion Of(uint64_t file) const;
  void Remove(uint64_t address) { regions_.erase(address); }
  Regions& regions() { return regions_; }
  const Regions& regions() const { return regions_; }

  // A handle of virtual memory.
  struct Handle {
    std::shared_ptr<MemoryFile> file;
    std::shared_ptr<Team> team;  // in place of it
    int device = -1;             // ordinal, or -1: a GPU that this process does not see
    unsigned types = 0;
  };
  std::map<uint64_t, Handle> handles;
  uint64_t last_handle = 0x10;
  std::map<uint64_t, int64_t> reservations;  // size by address
  std::map<uint64_t, int> num_opened;        // of IPC, by address
  int num_bindings = 0;                      // to multicast objects

  // Returns the bytes of a GPU's memory that this process has allocated.
  int64_t AllocatedBytes(int gpu) const;

 private:
  Regions regions_;
};

}  // namespace jax_ub::emulated
