// Waiting for an atomic that another thread stores, in this process or in a process
// that maps the same memory. A waiting thread spins briefly, then sleeps on a futex,
// its doorbell, which the storing thread rings.
#pragma once

#include <atomic>
#include <cstdint>
#include <thread>

#include "platform/deadline.h"
#include "platform/futex.h"

namespace jax_ub {

// The futex on which one rank, or one process, sleeps. Every thread that stores an
// awaited value then reads `num_sleepers`. So the doorbell has its own cache line,
// which stores to other data do not invalidate.
struct alignas(64) Doorbell {
  std::atomic<uint32_t> rings{0};
  // A process that is killed while it sleeps leaves this count too high. The only
  // effect is a few unnecessary system calls.
  std::atomic<uint32_t> num_sleepers{0};
};

// Wakes the threads that sleep on `doorbell`. Call it after storing the awaited value.
//
// No wakeup is lost: the caller stores the value and then loads `num_sleepers`; Await
// increments `num_sleepers` and then loads the value again. All four operations are
// sequentially consistent, so either the caller sees the sleeper and rings, or the
// sleeper sees the value and does not sleep. A ring between the sleeper's check and its
// system call changes the futex word, so that the system call returns at once.
inline void Ring(Doorbell& doorbell) {
  if (doorbell.num_sleepers.load() == 0) return;
  doorbell.rings.fetch_add(1);
  FutexWake(doorbell.rings);
}

inline void Pause() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("isb");
#endif
}

// Waits until `ready()` holds, for at most `timeout_s`. Returns whether it holds.
// `ready` must load with sequential consistency.
template <typename Ready>
bool Await(Doorbell& own, double timeout_s, const Ready& ready) {
  // A peer that runs on another core usually answers within a few hundred spins. A peer
  // that needs this core gets it through a yield. Further yields would only pass the
  // core between waiting threads and delay the thread that has work, so sleeping costs
  // less.
  constexpr int kSpins = 200;
  constexpr int kYields = 5;
  for (int i = 0; i < kSpins; ++i) {
    if (ready()) return true;
    Pause();
  }
  for (int i = 0; i < kYields; ++i) {
    if (ready()) return true;
    std::this_thread::yield();
  }
  const Deadline deadline = Deadline::After(timeout_s);
  own.num_sleepers.fetch_add(1);
  bool is_ready = false;
  for (;;) {
    const uint32_t rings = own.rings.load();
    is_ready = ready();
    if (is_ready || deadline.Expired()) break;
    FutexWait(own.rings, rings, deadline.time());
  }
  own.num_sleepers.fetch_sub(1);
  return is_ready;
}

}  // namespace jax_ub
