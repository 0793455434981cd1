// Submits calls to an engine, and waits for their results.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <exception>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "call_maker.h"
#include "engine/communicated_tensors.h"
#include "engine/cpu/engine.h"

namespace jax_ub {

constexpr double kLongS = 60;

// Engines are never destroyed, including the tests' engines.
inline Engine& NewEngine(double timeout_s = kLongS,
                         int num_threads = 2,
                         double first_call_timeout_s = 0) {
  static std::mutex mutex;
  static auto& engines = *new std::vector<Engine*>;
  std::lock_guard lock(mutex);
  engines.push_back(new Engine(num_threads, {timeout_s, first_call_timeout_s}));
  return *engines.back();
}

inline CallAttributes MakeAttributes(Op op, Method method, int num_ranks) {
  CallAttributes at;
  at.op = op;
  at.method = method;
  at.num_ranks = num_ranks;
  for (int r = 0; r < num_ranks; ++r) at.ranks.push_back(100 + r);
  at.num_splits = 2;
  at.label = std::string(OpName(op)) + " (ub_name 'test')";
  if (op == Op::kMatmul) {
    at.num_ranks = 1;
    at.ranks.clear();
  }
  return at;
}

// The outcome of a call, which threads can wait for.
class Outcome {
 public:
  Completion AsCompletion() {
    return [state = state_](const std::exception_ptr& failure) {
      std::lock_guard lock(state->mutex);
      state->text = "";
      if (failure) {
        try {
          std::rethrow_exception(failure);
        } catch (const std::exception& error) {
          state->text = error.what();
        }
      }
      state->changed.notify_all();
    };
  }

  // Waits for the call; returns the text of its error, or "" if it succeeded.
  std::string Wait() {
    std::unique_lock lock(state_->mutex);
    state_->changed.wait(lock, [this] { return state_->text.has_value(); });
    return *state_->text;
  }

  bool IsPending() {
    std::lock_guard lock(state_->mutex);
    return !state_->text.has_value();
  }

 private:
  struct State {
    std::mutex mutex;  // guards text
    std::condition_variable changed;
    std::optional<std::string> text;
  };
  std::shared_ptr<State> state_ = std::make_shared<State>();
};

inline Outcome Submit(Engine& engine,
                      CallSite& site,
                      int64_t run_id,
                      int64_t device,
                      const RankCall& call) {
  Outcome outcome;
  const Completion done = outcome.AsCompletion();
  try {
    engine.Submit(site, run_id, device, call, done);
  } catch (...) {
    done(std::current_exception());
  }
  return outcome;
}

// Runs the call of each rank in a separate thread; returns the error of each rank, ""
// if it succeeded.
inline std::vector<std::string> RunAll(Engine& engine,
                                       CallSite& site,
                                       int64_t run_id,
                                       const std::vector<RankCall>& calls) {
  std::vector<Outcome> outcomes(calls.size());
  std::vector<std::thread> threads;
  for (size_t rank = 0; rank < calls.size(); ++rank) {
    threads.emplace_back([&, rank] {
      const int64_t device = 100 + static_cast<int64_t>(rank);
      outcomes[rank] = Submit(engine, site, run_id, device, calls[rank]);
    });
  }
  for (std::thread& thread : threads) thread.join();
  std::vector<std::string> texts;
  for (Outcome& outcome : outcomes) texts.push_back(outcome.Wait());
  return texts;
}

// Returns calls of an op with different options, and with each variant of its schedule,
// without optional operands and with all of them.
inline std::vector<CallAttributes> Variants(Op op, Method method, int num_ranks) {
  CallAttributes at = MakeAttributes(op, method, num_ranks);
  std::vector<CallAttributes> variants = {at};
  at.return_gathered = at.accumulate = true;
  at.has_bias = at.has_residual = (InfoOf(op).attributes & (kBias | kAddends)) != 0;
  // Halves of small integers are exact; bulk calls have no scale.
  at.scale = InfoOf(op).is_bulk() ? 1.0f : 0.5f;
  variants.push_back(at);
  if (op == Op::kWgrad) {
    variants.clear();
    for (Gather gather : {Gather::kNone, Gather::kX, Gather::kDy}) {
      at.gather = gather;
      at.accumulate = !at.accumulate;
      at.num_kernels = gather == Gather::kX ? 1 : 2;
      variants.push_back(at);
    }
  } else if (InfoOf(op).gemm != GemmKind::kNone) {
    at.num_kernels = 2;
    at.rhs_transposed = !InfoOf(op).is_bulk();
    variants.push_back(at);
  }
  for (int v = 1; v < kNumVariants; ++v) {
    const auto variant = static_cast<Variant>(v);
    if (!HasVariant(InfoOf(op).collective, method, num_ranks, variant)) continue;
    for (CallAttributes other : {variants.front(), at}) {
      other.variant = variant;
      variants.push_back(other);
    }
  }
  return variants;
}

// Returns whether the op has the method: bulk is not a method of fused ops.
inline bool HasMethod(Op op, Method method) {
  const OpInfo& info = InfoOf(op);
  const bool fuses =
      info.communicated != Communicated::kNothing && HasProduct(info.collective);
  return !fuses || method != Method::kBulk;
}

}  // namespace jax_ub
