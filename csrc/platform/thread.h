// Threads of the engine. XLA may run any part of a program on them: what completes a call
// continues the program. They start in the state of XLA:CPU's own pool threads, which
// XLA's thread pool (tsl/platform/threadpool.cc, cpu_client.cc) and a probe in a host
// callback show to be
//
//   floating point   round to nearest, subnormals flushed to zero (ArithmeticMode)
//   stack            8 MiB, whatever `ulimit -s` says; here at least that
//   signal mask      that of the thread that made the pool
#pragma once

#include <pthread.h>
#include <signal.h>

#include <functional>

namespace jax_ub {

// The end of an error message about a thread that cannot start.
inline constexpr char kIsLimitReached[] =
    ": is the limit of threads reached (ulimit -u, or pids.max of the container)?";

// A signal mask for new threads.
class SignalMask {
 public:
  SignalMask();  // the mask of the calling thread
  void Apply() const;

 private:
  sigset_t mask_;
};

// A thread that is joined before its owner is destroyed.
class Thread {
 public:
  // Throws SystemError if the system starts no more threads. `body` must not throw.
  explicit Thread(std::function<void()> body, const SignalMask& mask = {});
  Thread(const Thread&) = delete;
  Thread& operator=(const Thread&) = delete;

  void Join();

 private:
  pthread_t thread_;
};

// Starts a thread that is never joined. Throws as Thread does.
void StartThread(std::function<void()> body, const SignalMask& mask = {});

}  // namespace jax_ub
