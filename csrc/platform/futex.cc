#include "platform/futex.h"

#include <linux/futex.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <climits>

namespace jax_ub {

// FUTEX_PRIVATE_FLAG is not used, because other processes may map the word.
// FUTEX_WAIT_BITSET takes an absolute time of CLOCK_MONOTONIC, the clock of
// steady_clock.
void FutexWait(const std::atomic<uint32_t>& word,
               uint32_t expected,
               Deadline::Clock::time_point deadline) {
  using std::chrono::duration_cast, std::chrono::nanoseconds, std::chrono::seconds;
  const auto since_boot = std::max(deadline.time_since_epoch(), nanoseconds(0));
  const auto whole = duration_cast<seconds>(since_boot);
  timespec until = {};
  until.tv_sec = static_cast<time_t>(whole.count());
  until.tv_nsec = static_cast<long>(nanoseconds(since_boot - whole).count());
  // The result is ignored, because the caller checks its condition again.
  syscall(SYS_futex, &word, FUTEX_WAIT_BITSET, expected, &until, nullptr,
          FUTEX_BITSET_MATCH_ANY);
}

void FutexWake(std::atomic<uint32_t>& word) noexcept {
  syscall(SYS_futex, &word, FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
}

}  // namespace jax_ub
