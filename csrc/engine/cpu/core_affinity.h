// Keeps the computing threads of a thread pool on different cores.
//
// Linux places a woken thread on a busy core if no core is idle at that moment. When a
// third thread wakes up, Linux may move a computing thread to the core of another
// computing thread. Linux takes many milliseconds to separate two busy threads again: a
// job of 20 ms would run on one core to its end, and a job of 2 ms would end before its
// second thread ran at all.
//
// Therefore a thread that wakes another thread to compute first restricts it to cores
// where no thread computes. If the pool has at least as many threads as cores, its
// computing threads are pinned. With fewer threads they may migrate, because other
// processes use the remaining cores, and this process does not know which cores these
// are.
#pragma once

#include <sched.h>
#include <sys/types.h>

#include <array>
#include <mutex>
#include <optional>
#include <vector>

namespace jax_ub {

// Returns the number of cores on which the calling thread may run, according to its CPU
// set. Ignores CPU-time quotas, such as those of docker --cpus.
int NumAllowedCores();

// Returns the default number of computing threads: the number of cores or, if smaller,
// the CPU-time quota (in cores) rounded up.
int DefaultNumThreads(int num_cores, std::optional<double> cpu_quota);

class CoreAffinity {
 public:
  enum class Who { kCaller, kWorker };

  // Restricts the pool to the cores in `part`, to leave the other cores to other
  // processes. Ignores cores on which the pool's threads may not run. An empty `part`
  // removes the restriction.
  void set_cpu_set(const std::vector<int>& part);
  std::vector<int> cpu_set() const;

  // The CPU set of one worker thread, which constructs this object. Initially, the
  // worker gets the CPU set of the thread that called the pool last.
  class Thread {
   public:
    explicit Thread(CoreAffinity& cores);

   private:
    friend class CoreAffinity;
    const pid_t id_;
    std::mutex mutex_;  // guards `is_idle_` and `assigned_`
    bool is_idle_ = true;
    std::optional<cpu_set_t> assigned_;  // the cores that it is restricted to
  };

  // Restricts an idle worker to cores where no thread computes, if there are any. The
  // restriction holds until Release, so that the next call finds the worker on one of
  // these cores. Does nothing if the worker has already begun other work.
  void AssignIdleCores(Thread& thread);
  // Called by a worker before it computes, so that AssignIdleCores does not move it to
  // another core.
  void SetBusy(Thread& thread);
  // Called by a worker before it runs a blocking task. Lets the worker run on any core.
  void Release(Thread& thread);
  // Called by a worker after its work, so that AssignIdleCores may move it to another
  // core.
  void SetIdle(Thread& thread);

  // Reserves a core for the calling thread while it computes, as one of `num_threads`
  // threads. If another thread already computes on the current core, the calling thread
  // first moves to a free core. If there are at least as many threads as cores, the
  // calling thread is pinned to its core. If all cores are taken, the scheduler chooses
  // a core.
  class ScopedCore {
   public:
    ScopedCore(CoreAffinity& cores, Who who, int num_threads);
    ~ScopedCore();
    ScopedCore(const ScopedCore&) = delete;
    ScopedCore& operator=(const ScopedCore&) = delete;

   private:
    bool TryReserve(Who who, int num_threads, cpu_set_t& stays);

    CoreAffinity& core_affinity_;
    int core_;
    bool stays_ = false;
    cpu_set_t allowed_;  // the CPU set before the thread was pinned
  };

 private:
  // Returns the cores in `allowed` that the pool may use, or `allowed` if there are
  // none.
  cpu_set_t CpuSetOf(const cpu_set_t& allowed) const;
  // Returns the cores in CpuSetOf(allowed) on which no thread of the pool computes.
  cpu_set_t FreeOf(const cpu_set_t& allowed) const;
  // Update num_on_core_ and busy_ when a thread begins (OccupyCore) or stops
  // (VacateCore) computing on a core.
  void OccupyCore(int core);
  void VacateCore(int core);

  // Guards the members below. No system call is made while it is held.
  mutable std::mutex mutex_;
  std::optional<cpu_set_t> cpu_set_;
  std::array<int, CPU_SETSIZE> num_on_core_ = {};  // [core]: threads that compute there
  cpu_set_t busy_ = {};                            // cores with num_on_core_ > 0
  std::optional<cpu_set_t> allowed_;  // CPU set of the last caller of the pool
};

}  // namespace jax_ub
