// Keeps the computing threads of a crew on different cores.
//
// Linux wakes a thread on a busy core when no core is idle at that moment, and takes
// many milliseconds to spread two busy threads again: a job of twenty milliseconds
// would be over on one core, and one of two before the second thread ran at all. So
// whoever wakes a thread to compute first keeps it apart from the cores where others of
// the crew compute; and a thread that nevertheless starts on such a core asks for the
// other ones, for as long as it computes.
#pragma once

#include <sched.h>
#include <sys/types.h>

#include <mutex>
#include <optional>
#include <vector>

namespace jax_ub {

class Cores {
 public:
  // A thread that others wake; made by itself.
  class Thread {
   public:
    Thread();

   private:
    friend class Cores;
    const pid_t id_;
    // Guarded by Cores::mutex_.
    std::optional<cpu_set_t> allowed_;  // before it was kept apart
    cpu_set_t apart_;                   // where it runs since then
  };

  // The thread, asleep or not, runs where nobody computes, if there is such a core;
  // until Release, so that the next call finds it where it should be.
  void KeepApart(Thread& thread);
  void Release(Thread& thread);

  // The calling thread's place, while it computes.
  class Seat {
   public:
    explicit Seat(Cores& cores);
    ~Seat();
    Seat(const Seat&) = delete;
    Seat& operator=(const Seat&) = delete;

   private:
    Cores& cores_;
    int core_;
    bool moved_ = false;
    cpu_set_t allowed_;  // before it moved
  };

 private:
  bool IsTaken(int core) const;
  cpu_set_t FreeOf(const cpu_set_t& allowed) const;
  void ReleaseLocked(Thread& thread);

  std::mutex mutex_;
  std::vector<int> taken_;  // guarded by mutex_; where the crew's threads began
};

}  // namespace jax_ub
