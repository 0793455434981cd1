// How a call tells that it has ended.
#pragma once

#include <concepts>
#include <exception>
#include <functional>
#include <memory>
#include <type_traits>
#include <utility>

#include "engine/cpu/blocking_task.h"

namespace jax_ub {

// Called once, with nullptr or with why the call failed, from a thread that no other one
// waits for: it may run the rest of the rank's program. The memory for that is there from
// the beginning, so that a call can always be ended.
class Completion {
 public:
  Completion() = default;
  template <typename Done>
    requires std::invocable<Done&, const std::exception_ptr&> &&
             (!std::same_as<std::remove_cvref_t<Done>, Completion>)
  Completion(Done done) : state_(std::make_shared<State>(std::move(done))) {}

  explicit operator bool() const { return state_ != nullptr; }

  void operator()(const std::exception_ptr& failure) const { state_->done(failure); }

  // The same as a run of the thread pool.
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
