// The callback that reports the end of a rank's call.
#pragma once

#include <concepts>
#include <exception>
#include <functional>
#include <memory>
#include <type_traits>
#include <utility>

#include "engine/cpu/queue.h"

namespace jax_ub {

// The callback that reports the end of a rank's call.
//
// The callback is invoked once, with the error of the call or nullptr. XLA may continue
// the rank's program in the callback, so no other thread may wait for the thread that
// invokes it. The memory of the callback is allocated on construction, so that
// completing a call cannot fail.
class Completion {
 public:
  Completion() = default;
  template <typename Done>
    requires std::invocable<Done&, const std::exception_ptr&> &&
             (!std::same_as<std::remove_cvref_t<Done>, Completion>)
  Completion(Done done) : state_(std::make_shared<State>(std::move(done))) {}

  explicit operator bool() const { return state_ != nullptr; }

  void operator()(const std::exception_ptr& failure) const { state_->done(failure); }

  // Returns a task that invokes the callback with `failure` on a thread pool.
  std::shared_ptr<BlockingTask> AsTask(
      const std::exception_ptr& failure) const noexcept {
    state_->failure = failure;
    return state_;
  }

 private:
  struct State : BlockingTask {
    explicit State(std::function<void(const std::exception_ptr&)> what)
        : done(std::move(what)) {}
    void Execute() override { done(failure); }

    const std::function<void(const std::exception_ptr&)> done;
    std::exception_ptr failure;
  };

  std::shared_ptr<State> state_;
};

}  // namespace jax_ub
