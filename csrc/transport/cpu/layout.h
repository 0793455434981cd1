// The layout of the memory that a process shares with its peers:
//
//   control block | area of its first rank | area of its second rank | ...
//   area:           rank header (doorbell, slot flags) | buffer 0 | buffer 1
//
// The memory is initially zero, which is a valid initial state. The control block, the
// rank headers and the buffers each begin at a multiple of kAlignment.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>

#include "transport/cpu/doorbell.h"
#include "transport/cpu/slots.h"

namespace jax_ub {

// Atomics in memory that several processes share must be lock-free: the lock of any
// other atomic would exist once per process.
static_assert(std::atomic<uint64_t>::is_always_lock_free);

// An entry of the call log. It identifies one execution of one call site, so that the
// other processes can find the local ranks that belong to the leader's call.
struct CallLogEntry {
  uint64_t call_site = 0;
  uint64_t execution = 0;
  // Whether this is the leader's first execution of the call site. The first execution
  // has a longer timeout, because other processes may still be compiling the program.
  bool is_first = false;

  bool operator==(const CallLogEntry&) const = default;
};

// The shared-memory form of a CallSignature.
struct SignatureRecord {
  static constexpr size_t kMaxBytes = 1024;
  uint64_t signature = 0;
  uint64_t size_bytes = 0;
  char text[kMaxBytes] = {};
};

// The state that a process shows to its peers. Written by that process only, except for
// the doorbell.
struct ProcessControlBlock {
  // The number of log entries that the leader may be ahead of the slowest process.
  static constexpr uint64_t kNumOrders = 64;

  // The thread of this process that executes calls sleeps here.
  Doorbell doorbell;
  // The generation of the last barrier at which this process arrived; 0: none.
  alignas(64) std::atomic<uint64_t> barrier_generation{0};
  // The call log; used in the leader's control block only. Call n has the entry
  // `orders[n % kNumOrders]`, which is written before `num_posted` exceeds n.
  alignas(64) std::atomic<uint64_t> num_posted{0};
  CallLogEntry orders[kNumOrders] = {};
  alignas(64) SignatureRecord signatures[2];  // [call % 2]
};

// The flags of one rank, in front of its two buffers.
struct RankHeader {
  static constexpr int kMaxSlots = 4096;
  Doorbell doorbell;
  SlotFlags flags[kMaxSlots];
};

// Computes addresses in the shared memory of a process. `memory` is the start of the
// mapping; `n` is the index of a rank among the ranks of that process.
class Layout {
 public:
  static constexpr int64_t kAlignment = 4096;  // the page size of most systems

  explicit Layout(int64_t buffer_bytes) : buffer_bytes_(Align(buffer_bytes)) {}

  int64_t buffer_bytes() const { return buffer_bytes_; }
  int64_t size_bytes(int num_ranks) const {
    return Align(sizeof(ProcessControlBlock)) + num_ranks * area_bytes();
  }

  ProcessControlBlock* header(std::byte* memory) const {
    return reinterpret_cast<ProcessControlBlock*>(memory);
  }
  // Returns the rank header at the start of the n-th rank's area.
  RankHeader* area(std::byte* memory, int n) const {
    return reinterpret_cast<RankHeader*>(memory + Align(sizeof(ProcessControlBlock)) +
                                         n * area_bytes());
  }
  // Returns buffer 0 of the n-th rank. Buffer 1 starts `buffer_bytes()` after it.
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
