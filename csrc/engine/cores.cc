#include "engine/cores.h"

#include <algorithm>

namespace jax_ub {

Cores::Seat::Seat(Cores& cores) : cores_(cores), core_(sched_getcpu()) {
  std::lock_guard lock(cores_.mutex_);
  if (cores_.IsTaken(core_) && sched_getaffinity(0, sizeof(allowed_), &allowed_) == 0) {
    cpu_set_t free = allowed_;
    for (int core : cores_.taken_) CPU_CLR(core, &free);
    moved_ = CPU_COUNT(&free) > 0 && sched_setaffinity(0, sizeof(free), &free) == 0;
    if (moved_) core_ = sched_getcpu();
  }
  cores_.taken_.push_back(core_);
}

Cores::Seat::~Seat() {
  // A failure leaves the thread on the cores that it computed on, which is no error.
  if (moved_) sched_setaffinity(0, sizeof(allowed_), &allowed_);
  std::lock_guard lock(cores_.mutex_);
  cores_.taken_.erase(std::find(cores_.taken_.begin(), cores_.taken_.end(), core_));
}

bool Cores::IsTaken(int core) const {
  return std::find(taken_.begin(), taken_.end(), core) != taken_.end();
}

}  // namespace jax_ub
