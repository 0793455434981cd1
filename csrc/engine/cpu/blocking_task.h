// What a thread of the pool may block in: a rank's schedule, the rest of an XLA program.
#pragma once

#include <functional>
#include <utility>

#include "engine/cpu/queue.h"

namespace jax_ub {

class BlockingTask : public Queued<BlockingTask> {
 public:
  virtual ~BlockingTask() = default;
  // Must not throw: no call is known here that could fail.
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
