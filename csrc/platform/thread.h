// Threads of the engine. XLA may run any part of a program on them, because the thread
// that completes a call continues the program. They therefore start in the same state
// as the threads of XLA:CPU's pool (source: tsl/platform/threadpool.cc and
// cpu_client.cc, and a probe in a host callback):
//
//   floating point   round to nearest, subnormals flushed to zero (ArithmeticMode)
//   stack            8 MiB, independent of `ulimit -s`; here at least 8 MiB
//   signal mask      the mask of the thread that created the pool
#pragma once

#include <pthread.h>
#include <signal.h>

#include <functional>

namespace jax_ub {

// End of the error message if a thread cannot be started.
inline constexpr char kIsLimitReached[] =
    ": is the limit of threads reached (ulimit -u, or pids.max of the container)?";

// The signal mask of the thread that constructs this object. Other threads can be
// started with this mask.
class SignalMask {
 public:
  SignalMask();  // copies the mask of the calling thread
  void Apply() const;

 private:
  sigset_t mask_;
};

// A thread with the floating-point mode of XLA's threads, and with at least their stack
// size. Join must be called before the object is destroyed.
class Thread {
 public:
  // Starts a thread that runs `body`, which must not throw. Throws SystemError if the
  // system cannot start another thread.
  explicit Thread(std::function<void()> body, const SignalMask& mask = {});
  Thread(const Thread&) = delete;
  Thread& operator=(const Thread&) = delete;

  void Join();

 private:
  pthread_t thread_;
};

// Starts a detached thread, which is never joined. Throws SystemError if the system
// cannot start another thread.
void StartThread(std::function<void()> body, const SignalMask& mask = {});

}  // namespace jax_ub
