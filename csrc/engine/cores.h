// Keeps the computing threads of a crew on different cores.
//
// Linux wakes a thread on a busy core when no core is idle at that moment, moves one that
// computes beside another when a third wakes up, and takes many milliseconds to spread
// two busy threads again: a job of twenty milliseconds would be over on one core, and one
// of two before the second thread ran at all. So whoever wakes a thread to compute first
// keeps it off the cores where others do; and where the crew computes on all its cores,
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

class Cores {
 public:
  enum class Who { kCaller, kCrew };

  // The crew computes on these alone, as far as its threads may run there; none: on all.
  // Other processes are to compute on the others.
  void set_part(const std::vector<int>& part);
  std::vector<int> part() const;

  // A thread of the crew; made by itself. It runs on the cores of those that it helps.
  class Thread {
   public:
    explicit Thread(Cores& cores);

   private:
    friend class Cores;
    const pid_t id_;
    std::mutex mutex_;  // guards the two below
    bool is_idle_ = true;
    std::optional<cpu_set_t> apart_;  // where it is kept
  };

  // An idle thread, asleep or not, will run where nobody computes, if there is such a
  // core; until Release, so that the next call finds it where it should be. No effect on
  // a thread that has begun something by itself.
  void KeepApart(Thread& thread);
  // What the thread says of itself: it computes, does something else and may run
  // anywhere, or is idle again.
  void SetBusy(Thread& thread);
  void Release(Thread& thread);
  void SetIdle(Thread& thread);

  // The calling thread's core while it computes, as one of num_threads. It moves first
  // where another one computes on that core, and does not leave it where the threads are
  // as many as the cores. Where every core is taken it goes where it likes.
  class Seat {
   public:
    Seat(Cores& cores, Who who, int num_threads);
    ~Seat();
    Seat(const Seat&) = delete;
    Seat& operator=(const Seat&) = delete;

   private:
    bool Claim(Who who, int num_threads, cpu_set_t& stays);

    Cores& cores_;
    int core_;
    bool stays_ = false;
    cpu_set_t allowed_;  // before it stayed
  };

 private:
  // Those of `allowed` that the crew computes on.
  cpu_set_t PartOf(const cpu_set_t& allowed) const;
  // Those of them that nobody has.
  cpu_set_t FreeOf(const cpu_set_t& allowed) const;
  void Take(int core);
  void GiveBack(int core);

  mutable std::mutex mutex_;  // guards all below; no system call is made under it
  std::optional<cpu_set_t> part_;
  std::array<int, CPU_SETSIZE> num_on_core_ = {};  // that compute
  cpu_set_t taken_ = {};                           // where that is not 0
  std::optional<cpu_set_t> allowed_;  // to the last one who called the crew
};

}  // namespace jax_ub
