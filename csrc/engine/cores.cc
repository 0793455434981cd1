#include "engine/cores.h"

#include <unistd.h>

#include <algorithm>

namespace jax_ub {

// A failure to set or to get the cores leaves a thread where it is, which is no error.

// The thread that made it may have a seat, and its cores are inherited.
Cores::Thread::Thread(Cores& cores) : id_(gettid()) {
  std::lock_guard lock(cores.mutex_);
  if (cores.allowed_) {
    sched_setaffinity(id_, sizeof(*cores.allowed_), &*cores.allowed_);
  }
}

void Cores::KeepApart(Thread& thread) {
  std::lock_guard lock(mutex_);
  if (!allowed_) return;
  const cpu_set_t free = FreeOf(*allowed_);
  if (CPU_COUNT(&free) == 0) return ReleaseLocked(thread);
  if (thread.apart_ && CPU_EQUAL(&free, &*thread.apart_)) return;
  if (sched_setaffinity(thread.id_, sizeof(free), &free) == 0) thread.apart_ = free;
}

void Cores::Release(Thread& thread) {
  std::lock_guard lock(mutex_);
  ReleaseLocked(thread);
}

void Cores::ReleaseLocked(Thread& thread) {
  if (!thread.apart_) return;
  sched_setaffinity(thread.id_, sizeof(*allowed_), &*allowed_);
  thread.apart_.reset();
}

Cores::Seat::Seat(Cores& cores, Who who, int num_threads)
    : cores_(cores), core_(sched_getcpu()) {
  cpu_set_t stays;
  const bool is_claimed = Claim(who, num_threads, stays);
  // Without the lock: it may have to wait for the core that it moves to.
  if (CPU_COUNT(&stays) > 0) {
    stays_ = sched_setaffinity(0, sizeof(stays), &stays) == 0;
  }
  if (is_claimed) return;
  core_ = sched_getcpu();
  std::lock_guard lock(cores_.mutex_);
  cores_.taken_.push_back(core_);
}

// True if nobody had the core that the thread is on. `stays`: where it shall stay, empty
// for anywhere.
bool Cores::Seat::Claim(Who who, int num_threads, cpu_set_t& stays) {
  CPU_ZERO(&stays);
  std::lock_guard lock(cores_.mutex_);
  if (sched_getaffinity(0, sizeof(allowed_), &allowed_) != 0) return false;
  if (who == Who::kCaller) cores_.allowed_ = allowed_;
  const cpu_set_t free = cores_.FreeOf(allowed_);
  if (!CPU_ISSET(core_, &free)) {
    stays = free;
    return false;
  }
  if (CPU_COUNT(&allowed_) <= num_threads) CPU_SET(core_, &stays);
  cores_.taken_.push_back(core_);
  return true;
}

Cores::Seat::~Seat() {
  if (stays_) sched_setaffinity(0, sizeof(allowed_), &allowed_);
  std::lock_guard lock(cores_.mutex_);
  cores_.taken_.erase(std::find(cores_.taken_.begin(), cores_.taken_.end(), core_));
}

cpu_set_t Cores::FreeOf(const cpu_set_t& allowed) const {
  cpu_set_t free = allowed;
  for (int core : taken_) CPU_CLR(core, &free);
  return free;
}

}  // namespace jax_ub
