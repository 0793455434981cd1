// Lets a thread wait until another thread stores a value in an atomic. The other thread
// may belong to another process that maps the same memory. A waiting thread spins
// briefly, then sleeps on a futex, which is called its doorbell. The thread that stores
// the value rings the doorbell. This is a system call only if a thread sleeps.
#pragma once

#include <atomic>
#include <cstdint>
#include <thread>

#include "platform/deadline.h"
#include "platform/futex.h"

namespace jax_ub {

// The futex on which the thread of one rank, or of one process, sleeps. A thread that
// has stored an awaited value reads `num_sleepers` to decide whether to wake sleepers.
// A doorbell has its own cache line, so that stores to other data do not slow down this
// read.
struct alignas(64) Doorbell {
  std::atomic<uint32_t> rings{0};
  // Number of threads that sleep or are about to sleep. If a process is killed while
  // its thread sleeps, the count stays too high. The other processes then make system
  // calls that wake no thread, which is harmless.
  std::atomic<uint32_t> num_sleepers{0};
};

// Wakes the threads that sleep on `doorbell`. Must be called after the awaited value
// was stored.
//
// No wakeup is lost. This function runs after the store of the value and then loads
// `num_sleepers`. Await increments `num_sleepers` and then loads the value again. All
// four operations are sequentially consistent, so either this function sees the
// sleeper, or the sleeper sees the value. A ring between the sleeper's check and its
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

// Waits until `ready()` is true or about `timeout_s` seconds have passed. Returns
// whether `ready()` was true. The time while the process is stopped does not count. The
// thread sleeps on the doorbell `own`. `ready` must load with sequential consistency,
// so that no wakeup is lost (see Ring).
template <typename Ready>
bool Await(Doorbell& own, double timeout_s, const Ready& ready) {
  // A waiting thread spins first, because a peer on another core usually answers within
  // a few hundred iterations. It then yields, because a peer may wait for this core.
  // Finally it sleeps, because more yields would only pass the core between waiting
  // threads.
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
  StoppableDeadline deadline = StoppableDeadline::After(timeout_s);
  own.num_sleepers.fetch_add(1);
  bool is_ready = false;
  for (;;) {
    const uint32_t rings = own.rings.load();
    is_ready = ready();
    if (is_ready || deadline.Expired()) break;
    FutexWait(own.rings, rings, deadline.next_check());
  }
  own.num_sleepers.fetch_sub(1);
  return is_ready;
}

}  // namespace jax_ub
