// A deadline for a wait, which also stores the timeout for error messages.
#pragma once

#include <algorithm>
#include <chrono>

namespace jax_ub {

// How long a rank waits for its peers by default.
inline constexpr double kDefaultTimeoutS = 120;

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

// A deadline that does not count the time while this process is stopped (Ctrl-Z,
// SIGSTOP, a frozen container, a debugger). The ranks of a stopped process cannot
// arrive, and often their peers cannot, either. The owner must call Expired at least
// once per kCheckPeriod. A much longer interval between two calls means that the
// process was stopped or got no core.
class StoppableDeadline {
 public:
  using Clock = Deadline::Clock;
  static constexpr std::chrono::seconds kCheckPeriod{1};

  static StoppableDeadline After(double timeout_s) {
    return StoppableDeadline(Deadline::After(timeout_s));
  }

  double timeout_s() const { return deadline_.timeout_s(); }
  // Returns the time until which the owner may sleep before it calls Expired.
  Clock::time_point next_check() const {
    return std::min(deadline_.time() + stopped_, checked_ + kCheckPeriod);
  }
  bool Expired(Clock::time_point now = Clock::now()) {
    const Clock::duration late = now - checked_ - kCheckPeriod;
    if (late > kCheckPeriod) stopped_ += late;  // less is a busy machine
    checked_ = now;
    return now >= deadline_.time() + stopped_;
  }

 private:
  explicit StoppableDeadline(const Deadline& deadline) : deadline_(deadline) {}

  Deadline deadline_;
  Clock::time_point checked_ = Clock::now();
  Clock::duration stopped_{0};
};

}  // namespace jax_ub
