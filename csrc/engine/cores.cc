#include "engine/cores.h"

#include <unistd.h>

#include <algorithm>

namespace jax_ub {

// A failure to set or to get the cores leaves a thread where it is, which is no error.

Cores::Thread::Thread() : id_(gettid()) {}

void Cores::KeepApart(Thread& thread) {
  std::lock_guard lock(mutex_);
  cpu_set_t allowed;
  if (thread.allowed_) {
    allowed = *thread.allowed_;
  } else if (sched_getaffinity(thread.id_, sizeof(allowed), &allowed) != 0) {
    return;
  }
  const cpu_set_t free = FreeOf(allowed);
  if (CPU_COUNT(&free) == 0 || CPU_EQUAL(&free, &allowed)) return ReleaseLocked(thread);
  if (thread.allowed_ && CPU_EQUAL(&free, &thread.apart_)) return;
  if (sched_setaffinity(thread.id_, sizeof(free), &free) != 0) return;
  thread.allowed_ = allowed;
  thread.apart_ = free;
}

void Cores::Release(Thread& thread) {
  std::lock_guard lock(mutex_);
  ReleaseLocked(thread);
}

void Cores::ReleaseLocked(Thread& thread) {
  if (!thread.allowed_) return;
  sched_setaffinity(thread.id_, sizeof(*thread.allowed_), &*thread.allowed_);
  thread.allowed_.reset();
}

Cores::Seat::Seat(Cores& cores) : cores_(cores), core_(sched_getcpu()) {
  std::lock_guard lock(cores_.mutex_);
  if (cores_.IsTaken(core_) && sched_getaffinity(0, sizeof(allowed_), &allowed_) == 0) {
    const cpu_set_t free = cores_.FreeOf(allowed_);
    moved_ = CPU_COUNT(&free) > 0 && sched_setaffinity(0, sizeof(free), &free) == 0;
    if (moved_) core_ = sched_getcpu();
  }
  cores_.taken_.push_back(core_);
}

Cores::Seat::~Seat() {
  if (moved_) sched_setaffinity(0, sizeof(allowed_), &allowed_);
  std::lock_guard lock(cores_.mutex_);
  cores_.taken_.erase(std::find(cores_.taken_.begin(), cores_.taken_.end(), core_));
}

bool Cores::IsTaken(int core) const {
  return std::find(taken_.begin(), taken_.end(), core) != taken_.end();
}

cpu_set_t Cores::FreeOf(const cpu_set_t& allowed) const {
  cpu_set_t free = allowed;
  for (int core : taken_) CPU_CLR(core, &free);
  return free;
}

}  // namespace jax_ub
