// Measures the time to plan a call, with and without cached blockings and slot plans.
// Reports the minimum of many repetitions, which excludes delays on a busy machine.
#include <algorithm>
#include <chrono>
#include <iostream>
#include <vector>

#include "call_maker.h"
#include "engine/cpu/cpu_device.h"
#include "engine/cpu/direct_planner.h"
#include "engine/executor.h"
#include "engine_calls.h"

namespace jax_ub {
namespace {

using jax_ub_test::Arrays;
using jax_ub_test::MakeCalls;

template <typename Function>
double MinimumUs(const Function& function) {
  constexpr int kNumBatches = 200;
  constexpr int kBatch = 20;
  using Clock = std::chrono::steady_clock;
  double least = 1e9;
  for (int batch = 0; batch < kNumBatches; ++batch) {
    const auto begin = Clock::now();
    for (int i = 0; i < kBatch; ++i) function();
    const std::chrono::duration<double, std::micro> us = Clock::now() - begin;
    least = std::min(least, us.count() / kBatch);
  }
  return least;
}

void BenchDirect(Op op, int num_ranks, int num_threads) {
  CallAttributes at = MakeAttributes(op, Method::kDirect, num_ranks);
  if (op == Op::kWgrad) at.gather = Gather::kX;
  Arrays arrays(0);
  const auto calls = MakeCalls(at, {1, 512 / num_ranks, 512, 64}, arrays);
  BlockingCache cache;
  const auto plan = [&](const Workers& workers) {
    return MinimumUs([&] { PlanDirect(at, {calls, calls}, workers); });
  };
  std::cout << OpName(op) << ", P = " << num_ranks << ", " << num_threads
            << " threads: kept " << plan({num_threads, &cache}) << " us, anew "
            << plan(num_threads) << " us" << std::endl;
}

void BenchSlots(Op op, int num_ranks) {
  const CallAttributes at = MakeAttributes(op, Method::kPipeline, num_ranks);
  Arrays arrays(0);
  const RankCall call = MakeCalls(at, {1, 512 / num_ranks, 512, 64}, arrays)[0];
  Engine& engine = NewEngine();
  const CpuDevice device(engine.pool());
  SlotPlans plans;
  const double kept = MinimumUs([&] { plans.Find(at, call, device).schedules->Of(1); });
  const double anew =
      MinimumUs([&] { ComputeSlotRequirements(at, call, device).schedules->Of(1); });
  std::cout << OpName(op) << " by slots, P = " << num_ranks << ": kept " << kept
            << " us, anew " << anew << " us" << std::endl;
}

}  // namespace
}  // namespace jax_ub

int main() {
  using jax_ub::Op;
  for (const int num_ranks : {2, 8, 16}) {
    for (const Op op :
         {Op::kAllGatherMatmul, Op::kMatmulReduceScatter, Op::kMatmulAllReduce}) {
      for (const int num_threads : {2, 16, 64}) {
        jax_ub::BenchDirect(op, num_ranks, num_threads);
      }
      jax_ub::BenchSlots(op, num_ranks);
    }
  }
}
