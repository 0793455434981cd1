// What lies where in the memory that a process shares with its peers:
//
//   header | area of its first rank | area of its second rank | ...
//   area:    doorbell | slot flags | buffer 0 | buffer 1
//
// Zeros are its first state. Everything begins at a multiple of kAlignment.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>

#include "transport/cpu/doorbell.h"
#include "transport/cpu/slots.h"

namespace jax_ub {

// Atomics in memory of several processes work when they are what the processor has.
static_assert(std::atomic<uint64_t>::is_always_lock_free);

// The leader's name of a call, for the others to find their part of it: which call, and
// which of its executions.
struct CallLogEntry {
  uint64_t call_site = 0;
  uint64_t execution = 0;
  // The call site's first call in the leader: the others may still compile the program.
  bool is_first = false;

  bool operator==(const CallLogEntry&) const = default;
};

// What one process tells the others about a call.
struct SignatureRecord {
  static constexpr size_t kMaxBytes = 1024;
  uint64_t signature = 0;
  uint64_t size_bytes = 0;
  char text[kMaxBytes] = {};
};

struct ProcessControlBlock {
  // Calls that the leader may have posted ahead of the slowest process.
  static constexpr uint64_t kNumOrders = 64;

  Doorbell doorbell;  // where the process's thread sleeps
  // The last barrier that the process came to.
  alignas(64) std::atomic<uint64_t> progress{0};
  // The leader's: call n at n % kNumOrders, written before num_posted says so.
  alignas(64) std::atomic<uint64_t> num_posted{0};
  CallLogEntry orders[kNumOrders] = {};
  alignas(64) SignatureRecord signatures[2];  // [call % 2]
};

struct RankHeader {
  static constexpr int kMaxSlots = 4096;
  Doorbell doorbell;
  SlotFlags flags[kMaxSlots];
};

class Layout {
 public:
  static constexpr int64_t kAlignment = 4096;  // a page, for most

  explicit Layout(int64_t buffer_bytes) : buffer_bytes_(Align(buffer_bytes)) {}

  int64_t buffer_bytes() const { return buffer_bytes_; }
  int64_t size_bytes(int num_ranks) const {
    return Align(sizeof(ProcessControlBlock)) + num_ranks * area_bytes();
  }

  ProcessControlBlock* header(std::byte* memory) const {
    return reinterpret_cast<ProcessControlBlock*>(memory);
  }
  // Of the process's n-th rank.
  RankHeader* area(std::byte* memory, int n) const {
    return reinterpret_cast<RankHeader*>(memory + Align(sizeof(ProcessControlBlock)) +
                                         n * area_bytes());
  }
  // Half 0; buffer 1 follows it.
  std::byte* buffers(std::byte* memory, int n) const {
    return reinterpret_cast<std::byte*>(area(memory, n)) + Align(sizeof(RankHeader));
  }

 private:
  static constexpr int64_t Align(int64_t bytes) {
    return (bytes + kAlignment - 1) / kAlignment * kAlignment;
  }
  int64_t area_bytes() const { return Align(sizeof(RankHeader)) + 2 * buffer_bytes_; }

  int64_t buffer_bytes_;
};

}  // namespace jax_ub
