// The layout of the memory that a process shares with its peers:
//
//   control block | area of its first rank | area of its second rank | ...
//   area:           rank header (doorbell, slot flags) | buffer 0 | buffer 1
//
// The memory is initially zero, which is a valid initial state. The control block, the
// rank headers and the buffers each begin at a multiple of kAlignment.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <string>
#include <string_view>

#include "transport/cpu/doorbell.h"
#include "transport/cpu/slots.h"

namespace jax_ub {

// Atomics in shared memory must be lock-free. An atomic that is not lock-free uses a
// lock, which would be a different lock in every process.
static_assert(std::atomic<uint64_t>::is_always_lock_free);

// An entry of the call log, which says which call all processes must run next. The
// entry identifies one execution of a call site. With it, each process finds the calls
// of its ranks that belong to this execution.
struct CallLogEntry {
  uint64_t call_site = 0;
  uint64_t execution = 0;
  // Whether this is the leader's first execution of the call site. Waits in such a call
  // have a longer timeout, because other processes may still be compiling the program.
  bool is_first = false;

  bool operator==(const CallLogEntry&) const = default;
};

// A string of at most kMaxBytes bytes. Shared memory needs an array of fixed size,
// because the characters of a std::string are in the memory of one process.
class SharedText {
 public:
  static constexpr size_t kMaxBytes = 1024;

  // Stores `text`, truncated to kMaxBytes.
  void Store(std::string_view text) {
    size_bytes_ = std::min(text.size(), kMaxBytes);
    std::memcpy(bytes_, text.data(), size_bytes_);
  }
  std::string Load() const {
    return {bytes_, std::min<uint64_t>(size_bytes_, kMaxBytes)};
  }

 private:
  uint64_t size_bytes_ = 0;
  char bytes_[kMaxBytes] = {};
};

// The form of a CallSignature in shared memory.
struct SignatureRecord {
  uint64_t signature = 0;
  SharedText text;
};

// The state that a process publishes in shared memory. Only this process writes it,
// except for the doorbell, which peers ring.
struct ProcessControlBlock {
  // Capacity of the call log. The leader may be this number of calls ahead of the
  // slowest process.
  static constexpr uint64_t kCallLogSize = 64;

  // The futex on which the thread that runs the calls of this process sleeps.
  Doorbell doorbell;
  // Generation of the last barrier at which this process has arrived. 0: the process
  // has not arrived at any barrier yet.
  alignas(64) std::atomic<uint64_t> barrier_generation{0};
  // Used in the leader's control block only. The entry of call n is
  // `call_log[n % kCallLogSize]`. It is valid when `num_posted` > n.
  alignas(64) std::atomic<uint64_t> num_posted{0};
  CallLogEntry call_log[kCallLogSize] = {};
  alignas(64) SignatureRecord signatures[2];  // [call % 2]
  // These fields report that this process makes other calls than the leader: entry n of
  // the leader's call log is a call that this process has not submitted. `submitted`
  // describes the calls that it has submitted, and `num_unmatched` is n + 1.
  alignas(64) std::atomic<uint64_t> num_unmatched{0};
  SharedText submitted;
};

// The doorbell and the slot flags of one rank. In shared memory, they precede the
// rank's two buffers.
struct RankHeader {
  static constexpr int kMaxSlots = 4096;
  Doorbell doorbell;
  SlotFlags flags[kMaxSlots];
};

// Computes addresses in the shared memory of one process, which begins at `memory`. `n`
// is the index of a rank among the ranks of that process.
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
  // Returns the header at the start of the memory of the process's n-th rank.
  RankHeader* area(std::byte* memory, int n) const {
    return reinterpret_cast<RankHeader*>(memory + Align(sizeof(ProcessControlBlock)) +
                                         n * area_bytes());
  }
  // Returns buffer 0 of the process's n-th rank. Buffer 1 follows after
  // `buffer_bytes()`.
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
