#include <pthread.h>

#include <atomic>
#include <mutex>

#include "engine/cpu/core_affinity.h"
#include "ffi/handlers.h"
#include "platform/cgroup.h"
#include "platform/deadline.h"

namespace jax_ub {

namespace {

constexpr Timeouts kTimeouts = {.call_s = kDefaultTimeoutS, .first_call_s = 600};

std::atomic<Engine*> engine{nullptr};
std::mutex creation;

}  // namespace

Engine* ExistingEngine() { return engine.load(std::memory_order_acquire); }

Engine& ProcessEngine() {
  Engine* found = engine.load(std::memory_order_acquire);
  if (found != nullptr) return *found;
  std::lock_guard lock(creation);
  found = engine.load(std::memory_order_relaxed);
  if (found == nullptr) {
    found = new Engine(DefaultNumThreads(NumAllowedCores(), CpuQuota()), kTimeouts);
    engine.store(found, std::memory_order_release);
    static const int registered = pthread_atfork(
        nullptr, nullptr, [] { engine.store(nullptr, std::memory_order_release); });
    static_cast<void>(registered);
  }
  return *found;
}

}  // namespace jax_ub
