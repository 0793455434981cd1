// Communicators between calls: slots are allocated once and used by whatever call
// comes.
#pragma once

#include <cstdint>
#include <memory>
#include <mutex>
#include <vector>

#include "transport/cpu/in_process.h"

namespace jax_ub {

class SlotPool {
 public:
  // Counts the memory that it gives back.
  struct Delete {
    SlotPool* pool = nullptr;
    void operator()(InProcessCommunicator* communicator) const;
  };
  using PooledCommunicator = std::unique_ptr<InProcessCommunicator, Delete>;

  SlotPool();

  // One that has at least this many slots of at least this size, for one call at a
  // time.
  PooledCommunicator Acquire(int num_ranks, int num_slots, int64_t slot_bytes);
  // Takes it back when all ranks have ended the call, unless one failed: then its
  // epochs no longer agree, and it is to be destroyed instead.
  void Release(PooledCommunicator communicator) noexcept;

  // Returns the memory of those that no call uses.
  void ReleaseFree();

  int64_t size_bytes() const;  // of those that exist
  int64_t peak_bytes() const;  // most there ever was

 private:
  mutable std::mutex mutex_;  // guards all below
  int64_t size_bytes_ = 0;
  int64_t peak_bytes_ = 0;
  std::vector<PooledCommunicator> free_;  // the last: destroying them counts
};

}  // namespace jax_ub
