// Keeps the computing threads of a thread pool on different cores.
//
// Linux wakes a thread on a busy core when no core is idle at that moment, moves one that
// computes beside another when a third wakes up, and takes many milliseconds to spread
// two busy threads again: a job of twenty milliseconds would be over on one core, and one
// of two before the second thread ran at all. So whoever wakes a thread to compute first
// keeps it off the cores where others do; and where the thread pool computes on all its cores,
// its threads stay on theirs. With fewer threads than cores they may move: other
// processes, whose cores nobody here knows, have the rest.
#pragma once

#include <sched.h>
#include <sys/types.h>

#include <array>
#include <mutex>
#include <optional>
#include <vector>

namespace jax_ub {

// How many cores the calling thread may run on: a CPU set, of a task or a container, has
// fewer than the machine. A quota of processor time (docker --cpus) does not count here.
int NumAllowedCores();

// How many threads compute unless the user says otherwise: no more than the quota of
// processor time, rounded up, and than the cores; at least one.
int DefaultNumThreads(int num_cores, std::optional<double> cpu_quota);

class CoreAffinity {
 public:
  enum class Who { kCaller, kWorker };

  // The thread pool computes on these alone, as far as its threads may run there; none: on all.
  // Other processes are to compute on the others.
  void set_cpu_set(const std::vector<int>& part);
  std::vector<int> cpu_set() const;

  // A thread of the thread pool; made by itself. It runs on the cores of those that it helps.
  class Thread {
   public:
    explicit Thread(CoreAffinity& cores);

   private:
    friend class CoreAffinity;
    const pid_t id_;
    std::mutex mutex_;  // guards the two below
    bool is_idle_ = true;
    std::optional<cpu_set_t> assigned_;  // where it is kept
  };

  // An idle thread, asleep or not, will run where nobody computes, if there is such a
  // core; until Release, so that the next call finds it where it should be. No effect on
  // a thread that has begun something by itself.
  void AssignIdleCores(Thread& thread);
  // What the thread says of itself: it computes, does something else and may run
  // anywhere, or is idle again.
  void SetBusy(Thread& thread);
  void Release(Thread& thread);
  void SetIdle(Thread& thread);

  // The calling thread's core while it computes, as one of num_threads. It moves first
  // where another one computes on that core, and does not leave it where the threads are
  // as many as the cores. Where every core is taken it goes where it likes.
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
    cpu_set_t allowed_;  // before it stayed
  };

 private:
  // Those of `allowed` that the thread pool computes on.
  cpu_set_t CpuSetOf(const cpu_set_t& allowed) const;
  // Those of them that nobody has.
  cpu_set_t FreeOf(const cpu_set_t& allowed) const;
  void Take(int core);
  void GiveBack(int core);

  mutable std::mutex mutex_;  // guards all below; no system call is made under it
  std::optional<cpu_set_t> cpu_set_;
  std::array<int, CPU_SETSIZE> num_on_core_ = {};  // that compute
  cpu_set_t busy_ = {};                            // where that is not 0
  std::optional<cpu_set_t> allowed_;  // to the last one who called the thread pool
};

}  // namespace jax_ub
