// Pool of in-process communicators. Slots are allocated once and reused by later calls
// of any call site.
#pragma once

#include <cstdint>
#include <memory>
#include <mutex>
#include <vector>

#include "transport/cpu/in_process.h"

namespace jax_ub {

class SlotPool {
 public:
  // Deleter that subtracts the freed memory from `size_bytes_`.
  struct Delete {
    SlotPool* pool = nullptr;
    void operator()(InProcessCommunicator* communicator) const;
  };
  using PooledCommunicator = std::unique_ptr<InProcessCommunicator, Delete>;

  SlotPool();

  // Returns a communicator with at least `num_slots` slots of at least `slot_bytes`,
  // for the exclusive use of one call.
  PooledCommunicator Acquire(int num_ranks, int num_slots, int64_t slot_bytes);
  // Returns a communicator to the pool after all ranks have completed the call. If a
  // rank failed, destroy the communicator instead: its epochs no longer agree.
  void Release(PooledCommunicator communicator) noexcept;

  // Frees the communicators that no call uses.
  void ReleaseFree();

  int64_t size_bytes() const;  // of all communicators that exist
  int64_t peak_bytes() const;  // maximum of size_bytes() so far

 private:
  mutable std::mutex mutex_;  // guards the members below
  int64_t size_bytes_ = 0;
  int64_t peak_bytes_ = 0;
  // Declared last, because destroying the communicators updates the counters above.
  std::vector<PooledCommunicator> free_;
};

}  // namespace jax_ub
