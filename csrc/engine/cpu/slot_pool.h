// Pool of in-process communicators. The slots (receive buffers) of a communicator are
// allocated once, and reused by later calls of any call site.
#pragma once

#include <cstdint>
#include <memory>
#include <mutex>
#include <vector>

#include "transport/cpu/in_process.h"

namespace jax_ub {

class SlotPool {
 public:
  // Deletes a communicator, and subtracts its size from SlotPool::size_bytes_.
  struct Delete {
    SlotPool* pool = nullptr;
    void operator()(InProcessCommunicator* communicator) const;
  };
  using PooledCommunicator = std::unique_ptr<InProcessCommunicator, Delete>;

  SlotPool();

  // Returns a communicator with at least `num_slots` slots (receive buffers) of at
  // least `slot_bytes` bytes per rank. No other call uses the communicator until
  // Release.
  PooledCommunicator Acquire(int num_ranks, int num_slots, int64_t slot_bytes);
  // Returns a communicator to the pool after all ranks have completed the call. After a
  // failed call, the caller must destroy the communicator instead, because the epochs
  // (use counts) of its slots may differ between ranks.
  void Release(PooledCommunicator communicator) noexcept;

  // Frees the communicators that are kept for reuse, with their slots.
  void ReleaseFree();

  int64_t size_bytes() const;  // of all communicators that exist
  int64_t peak_bytes() const;  // maximum of size_bytes() so far

 private:
  mutable std::mutex mutex_;  // guards the members below
  int64_t size_bytes_ = 0;
  int64_t peak_bytes_ = 0;
  // Declared last, so that it is destroyed first: its deleter (Delete) updates the
  // members above.
  std::vector<PooledCommunicator> free_;
};

}  // namespace jax_ub
