// How a thread waits for what another one stores, in its own process or in one that
// maps the same memory: looks a little, then sleeps on its own doorbell.
#pragma once

#include <atomic>
#include <cstdint>
#include <thread>

#include "platform/deadline.h"
#include "platform/futex.h"

namespace jax_ub {

// Where a rank, or a process, sleeps. On a cache line of its own: whoever stores what
// it waits for reads it each time.
struct alignas(64) Doorbell {
  std::atomic<uint32_t> rings{0};
  // Left too high by a sleeper that was killed: then some rings are for nobody.
  std::atomic<uint32_t> num_sleepers{0};
};

// Behind the store that the sleeper waits for. That store comes before `num_sleepers`
// is looked at here; in Await, `num_sleepers` is raised before the stored value is
// looked at again. All four are sequentially consistent, so one of the two sees the
// other: this rings, or the sleeper does not go to sleep. A ring in between changes the
// word that the sleeper hands to the kernel, and it does not sleep either.
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

// Until `ready()`, which loads with sequential consistency; false: only up to the
// deadline.
template <typename Ready>
bool Await(Doorbell& own, double timeout_s, const Ready& ready) {
  // A peer on another core answers within a few hundred looks; one that needs this core
  // gets it by the yields. Beyond a few of them, those who wait on one core only hand it
  // to each other, while the one with work waits for its turn: sleeping costs less.
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
