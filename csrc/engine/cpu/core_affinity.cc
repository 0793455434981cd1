#include "engine/cpu/core_affinity.h"

#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <thread>

namespace jax_ub {

int NumAllowedCores() {
  cpu_set_t allowed;
  if (sched_getaffinity(0, sizeof(allowed), &allowed) == 0) return CPU_COUNT(&allowed);
  // sched_getaffinity has failed, because the machine has more cores than a cpu_set_t
  // can represent.
  return std::max(static_cast<int>(std::thread::hardware_concurrency()), 1);
}

int DefaultNumThreads(int num_cores, std::optional<double> cpu_quota) {
  if (!cpu_quota || *cpu_quota >= num_cores) return num_cores;
  return std::max(static_cast<int>(std::ceil(*cpu_quota)), 1);
}

// In this file, errors of sched_setaffinity and sched_getaffinity are ignored, because
// pinning only improves speed.

void CoreAffinity::set_cpu_set(const std::vector<int>& part) {
  std::lock_guard lock(mutex_);
  cpu_set_t cores;
  CPU_ZERO(&cores);
  for (int core : part) CPU_SET(core, &cores);
  cpu_set_.reset();
  if (!part.empty()) cpu_set_ = cores;
}

std::vector<int> CoreAffinity::cpu_set() const {
  std::lock_guard lock(mutex_);
  std::vector<int> part;
  for (int core = 0; cpu_set_ && core < CPU_SETSIZE; ++core) {
    if (CPU_ISSET(core, &*cpu_set_)) part.push_back(core);
  }
  return part;
}

// A new thread inherits the CPU set of the thread that starts it, which may be pinned
// to one core. Therefore, the new thread gets the CPU set of the thread that called the
// pool last.
CoreAffinity::Thread::Thread(CoreAffinity& cores)
    : id_(static_cast<pid_t>(syscall(SYS_gettid))) {  // glibc 2.28 has no gettid
  std::optional<cpu_set_t> allowed;
  {
    std::lock_guard lock(cores.mutex_);
    allowed = cores.allowed_;
  }
  if (allowed) sched_setaffinity(id_, sizeof(*allowed), &*allowed);
}

void CoreAffinity::AssignIdleCores(Thread& thread) {
  cpu_set_t allowed, free;
  {
    std::lock_guard lock(mutex_);
    if (!allowed_) return;
    allowed = *allowed_;
    free = FreeOf(allowed);
  }
  std::lock_guard lock(thread.mutex_);
  if (!thread.is_idle_) return;
  const bool none_is_free = CPU_COUNT(&free) == 0;
  if (none_is_free ? !thread.assigned_
                   : thread.assigned_ && CPU_EQUAL(&free, &*thread.assigned_)) {
    return;
  }
  const cpu_set_t& cores = none_is_free ? allowed : free;
  if (sched_setaffinity(thread.id_, sizeof(cores), &cores) != 0) return;
  thread.assigned_.reset();
  if (!none_is_free) thread.assigned_ = free;
}

void CoreAffinity::SetBusy(Thread& thread) {
  std::lock_guard lock(thread.mutex_);
  thread.is_idle_ = false;
}

void CoreAffinity::Release(Thread& thread) {
  cpu_set_t allowed;
  {
    std::lock_guard lock(mutex_);
    if (allowed_) allowed = *allowed_;
  }
  std::lock_guard lock(thread.mutex_);
  thread.is_idle_ = false;
  // AssignIdleCores sets `assigned_` only after `allowed_` was set, so `allowed` is
  // initialized if `assigned_` is set.
  if (!thread.assigned_) return;
  sched_setaffinity(thread.id_, sizeof(allowed), &allowed);
  thread.assigned_.reset();
}

void CoreAffinity::SetIdle(Thread& thread) {
  std::lock_guard lock(thread.mutex_);
  thread.is_idle_ = true;
}

void CoreAffinity::OccupyCore(int core) {
  if (core < 0 || core >= CPU_SETSIZE) return;
  ++num_on_core_[core];
  CPU_SET(core, &busy_);
}

void CoreAffinity::VacateCore(int core) {
  if (core < 0 || core >= CPU_SETSIZE) return;
  if (--num_on_core_[core] == 0) CPU_CLR(core, &busy_);
}

CoreAffinity::ScopedCore::ScopedCore(CoreAffinity& cores, Who who, int num_threads)
    : core_affinity_(cores), core_(sched_getcpu()) {
  cpu_set_t stays;
  const bool is_claimed = TryReserve(who, num_threads, stays);
  // The lock is not held while the CPU set changes, because the system call may block
  // until a core of the set is available.
  if (CPU_COUNT(&stays) > 0) {
    stays_ = sched_setaffinity(0, sizeof(stays), &stays) == 0;
  }
  if (is_claimed) return;
  core_ = sched_getcpu();
  std::lock_guard lock(core_affinity_.mutex_);
  core_affinity_.OccupyCore(core_);
}

// Reserves the current core and returns true if no other thread computes on this core.
// Sets `stays` to the CPU set that the calling thread must get, or to an empty set if
// the thread needs no restriction.
bool CoreAffinity::ScopedCore::TryReserve(Who who, int num_threads, cpu_set_t& stays) {
  CPU_ZERO(&stays);
  if (sched_getaffinity(0, sizeof(allowed_), &allowed_) != 0) return false;
  std::lock_guard lock(core_affinity_.mutex_);
  if (who == Who::kCaller) core_affinity_.allowed_ = allowed_;
  // `all` has all cores that the last caller of the pool may use. The CPU set of a
  // worker may have fewer cores: those that were free in an earlier call.
  const cpu_set_t all = core_affinity_.allowed_.value_or(allowed_);
  cpu_set_t free = core_affinity_.FreeOf(allowed_);
  if (CPU_COUNT(&free) == 0) free = core_affinity_.FreeOf(all);
  if (!CPU_ISSET(core_, &free)) {
    stays = free;
    return false;
  }
  const cpu_set_t part = core_affinity_.CpuSetOf(all);
  if (CPU_COUNT(&part) <= num_threads) {
    CPU_SET(core_, &stays);
  } else if (core_affinity_.cpu_set_) {
    stays = free;
  }
  core_affinity_.OccupyCore(core_);
  return true;
}

CoreAffinity::ScopedCore::~ScopedCore() {
  if (stays_) sched_setaffinity(0, sizeof(allowed_), &allowed_);
  std::lock_guard lock(core_affinity_.mutex_);
  core_affinity_.VacateCore(core_);
}

cpu_set_t CoreAffinity::CpuSetOf(const cpu_set_t& allowed) const {
  if (!cpu_set_) return allowed;
  cpu_set_t part;
  CPU_AND(&part, &allowed, &*cpu_set_);
  return CPU_COUNT(&part) > 0 ? part : allowed;
}

cpu_set_t CoreAffinity::FreeOf(const cpu_set_t& allowed) const {
  cpu_set_t free = CpuSetOf(allowed);
  cpu_set_t both;
  CPU_AND(&both, &free, &busy_);
  CPU_XOR(&free, &free, &both);
  return free;
}

}  // namespace jax_ub
