#include "platform/thread.h"

#include <algorithm>
#include <cfenv>
#include <cstddef>
#include <cstring>
#include <memory>
#include <string>
#include <utility>

#include "platform/arithmetic_mode.h"
#include "platform/error.h"

namespace jax_ub {

namespace {

constexpr size_t kMinStackBytes = size_t{8} << 20;
// Name of all threads that this file starts, as shown by ps. Linux limits names to 15
// characters.
constexpr char kName[] = "jax_ub";

struct Start {
  std::function<void()> body;
  SignalMask mask;
};

class ThreadAttributes {
 public:
  ThreadAttributes() {
    pthread_getattr_default_np(&attributes_);
    size_t stack_bytes = 0;
    pthread_attr_getstacksize(&attributes_, &stack_bytes);
    pthread_attr_setstacksize(&attributes_, std::max(stack_bytes, kMinStackBytes));
  }
  ~ThreadAttributes() { pthread_attr_destroy(&attributes_); }
  ThreadAttributes(const ThreadAttributes&) = delete;
  ThreadAttributes& operator=(const ThreadAttributes&) = delete;

  pthread_attr_t* get() { return &attributes_; }

 private:
  pthread_attr_t attributes_;
};

void* Run(void* argument) noexcept {
  const std::unique_ptr<Start> start(static_cast<Start*>(argument));
  std::fesetenv(FE_DFL_ENV);  // also resets the x87 unit, which `long double` uses
  const ArithmeticMode mode;
  start->mask.Apply();
  pthread_setname_np(pthread_self(), kName);
  start->body();
  return nullptr;
}

pthread_t NewThread(std::function<void()> body, const SignalMask& mask) {
  auto start = std::make_unique<Start>(Start{std::move(body), mask});
  ThreadAttributes attributes;
  pthread_t thread;
  const int error = pthread_create(&thread, attributes.get(), &Run, start.get());
  if (error != 0) {
    throw SystemError("a thread cannot start: " + std::string(std::strerror(error)) +
                      kIsLimitReached);
  }
  static_cast<void>(start.release());  // Run takes ownership
  return thread;
}

}  // namespace

SignalMask::SignalMask() { pthread_sigmask(SIG_SETMASK, nullptr, &mask_); }

void SignalMask::Apply() const { pthread_sigmask(SIG_SETMASK, &mask_, nullptr); }

Thread::Thread(std::function<void()> body, const SignalMask& mask)
    : thread_(NewThread(std::move(body), mask)) {}

void Thread::Join() { pthread_join(thread_, nullptr); }

void StartThread(std::function<void()> body, const SignalMask& mask) {
  pthread_detach(NewThread(std::move(body), mask));
}

}  // namespace jax_ub
