// A deadline for a wait, which also stores the timeout for error messages.
#pragma once

#include <chrono>

namespace jax_ub {

class Deadline {
 public:
  using Clock = std::chrono::steady_clock;

  static Deadline After(double timeout_s) {
    return Deadline(Clock::now() + std::chrono::duration_cast<Clock::duration>(
                                       std::chrono::duration<double>(timeout_s)),
                    timeout_s);
  }

  Clock::time_point time() const { return time_; }
  double timeout_s() const { return timeout_s_; }
  bool Expired() const { return Clock::now() >= time_; }

 private:
  Deadline(Clock::time_point time, double timeout_s)
      : time_(time), timeout_s_(timeout_s) {}

  Clock::time_point time_;
  double timeout_s_;
};

}  // namespace jax_ub
