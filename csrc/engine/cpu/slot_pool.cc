#include "engine/cpu/slot_pool.h"

#include <algorithm>
#include <utility>

namespace jax_ub {

namespace {

// Maximum number of unused communicators that are kept for reuse. A small number
// suffices, because few calls use slots at the same time.
constexpr size_t kMaxFree = 8;

}  // namespace

void SlotPool::Delete::operator()(InProcessCommunicator* communicator) const {
  {
    std::lock_guard lock(pool->mutex_);
    pool->size_bytes_ -= communicator->size_bytes();
  }
  delete communicator;
}

SlotPool::SlotPool() { free_.reserve(kMaxFree + 1); }

SlotPool::PooledCommunicator SlotPool::Acquire(int num_ranks,
                                               int num_slots,
                                               int64_t slot_bytes) {
  {
    std::lock_guard lock(mutex_);
    const auto found = std::find_if(free_.begin(), free_.end(), [&](const auto& one) {
      return one->num_ranks() == num_ranks && one->num_slots() >= num_slots &&
             one->slot_bytes() >= slot_bytes;
    });
    if (found != free_.end()) {
      auto communicator = std::move(*found);
      free_.erase(found);
      return communicator;
    }
  }
  PooledCommunicator communicator(
      new InProcessCommunicator(num_ranks, num_slots, slot_bytes), Delete{this});
  std::lock_guard lock(mutex_);
  size_bytes_ += communicator->size_bytes();
  peak_bytes_ = std::max(peak_bytes_, size_bytes_);
  return communicator;
}

void SlotPool::Release(PooledCommunicator communicator) noexcept {
  PooledCommunicator dropped;  // destroyed after the lock is released
  std::lock_guard lock(mutex_);
  free_.push_back(std::move(communicator));  // capacity was reserved in the constructor
  if (free_.size() <= kMaxFree) return;
  dropped = std::move(free_.front());
  free_.erase(free_.begin());
}

void SlotPool::ReleaseFree() {
  std::vector<PooledCommunicator> dropped;  // destroyed after the lock is released
  dropped.reserve(kMaxFree + 1);
  std::lock_guard lock(mutex_);
  dropped.swap(free_);
}

int64_t SlotPool::size_bytes() const {
  std::lock_guard lock(mutex_);
  return size_bytes_;
}

int64_t SlotPool::peak_bytes() const {
  std::lock_guard lock(mutex_);
  return peak_bytes_;
}

}  // namespace jax_ub
