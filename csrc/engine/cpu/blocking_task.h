// A task that may block a thread of the pool: a rank's schedule, or the continuation of
// an XLA program.
#pragma once

#include <functional>
#include <utility>

#include "engine/cpu/queue.h"

namespace jax_ub {

class BlockingTask : public Queued<BlockingTask> {
 public:
  virtual ~BlockingTask() = default;
  // Runs the task. Must not throw, because the pool does not know which call to fail.
  virtual void Execute() = 0;
};

class Closure : public BlockingTask {
 public:
  explicit Closure(std::function<void()> body) : body_(std::move(body)) {}
  void Execute() override { body_(); }

 private:
  const std::function<void()> body_;
};

}  // namespace jax_ub
