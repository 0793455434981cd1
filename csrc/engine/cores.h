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

#include <mutex>
#include <optional>
#include <vector>

namespace jax_ub {

// How many cores the calling thread may run on: a task set and a container have fewer
// than the machine.
int NumAllowedCores();

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
    std::optional<cpu_set_t> apart_;  // guarded by Cores::mutex_; where it is kept
  };

  // The thread, asleep or not, runs where nobody computes, if there is such a core;
  // until Release, so that the next call finds it where it should be.
  void KeepApart(Thread& thread);
  void Release(Thread& thread);

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
  void ReleaseLocked(Thread& thread);

  mutable std::mutex mutex_;  // guards all below
  std::optional<cpu_set_t> part_;
  std::vector<int> taken_;            // by those that compute
  std::optional<cpu_set_t> allowed_;  // to the last one who called the crew
};

}  // namespace jax_ub
