// Keeps the computing threads of a crew on different cores.
//
// Linux wakes a thread on its waker's core when no core is idle at that moment, and
// takes many milliseconds to spread two busy threads again: a job of twenty
// milliseconds would be over on one core. A thread that starts to compute on a core
// where another one of the crew computes therefore asks for the other cores, for as
// long as it computes.
#pragma once

#include <sched.h>

#include <mutex>
#include <vector>

namespace jax_ub {

class Cores {
 public:
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

  std::mutex mutex_;
  std::vector<int> taken_;  // guarded by mutex_; where the crew's threads began
};

}  // namespace jax_ub
