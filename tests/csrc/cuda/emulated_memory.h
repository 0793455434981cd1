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

// What an operation reads or writes: rows of bytes.
struct Touch {
  uint64_t address = 0;
  int64_t num_rows = 1;
  int64_t row_bytes = 0;
  int64_t stride_bytes = 0;
  bool by_multicast = false;  // at every device, by an address that stands for all

  // From the first byte to the last.
  int64_t span_bytes() const {
    return num_rows <= 0 || row_bytes <= 0 ? 0
                                           : (num_rows - 1) * stride_bytes + row_bytes;
  }
};

// A memory file, of one GPU of the machine; other processes find it by what `Describe`
// says, as long as it is open here.
struct MemoryFile {
  FileDescriptor descriptor;
  int gpu = 0;
  int64_t size_bytes = 0;
  uint64_t id = 0;
  bool is_own = false;  // made by this process

  // New, filled with 0xFF at the front.
  static std::shared_ptr<MemoryFile> Make(int gpu, int64_t size_bytes);
  // What such a descriptor stands for; nullptr if it is none of these.
  static std::shared_ptr<MemoryFile> Open(int descriptor);
  // The one that process `pid` has open as `descriptor`, if its id is `id`.
  static std::shared_ptr<MemoryFile> Find(int pid, int descriptor, uint64_t id);
};

// A multicast object: which memory files are bound to it, for all processes.
struct Team {
  static constexpr int kMaxDevices = 16;
  struct Bound {
    int gpu = 0;
    uint64_t file = 0;  // its id
    int64_t size_bytes = 0;
  };
  // In memory that processes share, under a lock.
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
  // As of a MemoryFile.
  static std::shared_ptr<Team> Open(int descriptor);
  static std::shared_ptr<Team> Find(int pid, int descriptor, uint64_t id);

  // Runs `body` on what is shared.
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

// A range of addresses with memory in it.
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

  // New addresses, aligned, with a gap after them; 0: there are none left.
  static uint64_t Reserve(int64_t size_bytes, int64_t alignment);
  static bool Holds(uint64_t address);

  // Maps the file at the region's address; with access or without.
  void Add(SharedRegion region, bool is_accessible);
  // The region that begins there, if it is of this kind.
  SharedRegion Find(uint64_t address, Region::Kind kind) const;
  // The region around an address; nullptr: none.
  SharedRegion Around(uint64_t address) const;
  // A mapping of that file; nullptr: there is none.
  SharedRegion Of(uint64_t file) const;
  void Remove(uint64_t address) { regions_.erase(address); }
  Regions& regions() { return regions_; }
  const Regions& regions() const { return regions_; }

  // Handles of virtual memory.
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

  // What this process has allocated of a GPU's memory.
  int64_t AllocatedBytes(int gpu) const;

 private:
  Regions regions_;
};

}  // namespace jax_ub::emulated
