// Tests the results of all ops through the CUDA engine, with all ranks in one process,
// on emulated GPUs: eager and replayed.
#include <vector>

#include "check.h"
#include "cuda/captured_calls.h"
#include "cuda/cuda_calls.h"

namespace jax_ub {
namespace {

// Calls `function` with the calls to test for P ranks: all of them up to P = 4. For
// larger P, to save time, one third, and another third for P + 1.
template <typename Function>
void ForEachCall(int num_ranks, const Function& function) {
  int seed = 0;
  ForEachVariant(num_ranks, [&](const CallAttributes& at) {
    ++seed;
    if (num_ranks > 4 && (seed + num_ranks) % 3 != 0) return;
    function(at, seed % 2 == 0 ? DType::kF32 : DType::kBF16, seed);
  });
}

TEST(EveryOpByEveryMethodIsExact) {
  for (int num_ranks = 1; num_ranks <= kMaxTestRanks; ++num_ranks) {
    Gpus gpus({.num_devices = num_ranks, .seed = 3, .max_delay_us = 30});
    ForEachCall(num_ranks, [&](const CallAttributes& at, DType dtype, int seed) {
      GpuCalls calls(gpus, at, {}, dtype, seed);
      calls.RunAll();
      gpus.Synchronize();
      CheckRight(calls);
    });
  }
}

TEST(CapturedCallsAreExactWheneverTheyAreReplayed) {
  for (int num_ranks = 1; num_ranks <= kMaxTestRanks; ++num_ranks) {
    Gpus gpus({.num_devices = num_ranks, .seed = 5, .max_delay_us = 30});
    ForEachCall(num_ranks, [&](const CallAttributes& at, DType dtype, int seed) {
      GpuCalls calls(gpus, at, {}, dtype, seed);
      CheckReplays(gpus, calls, 100 * seed);
    });
  }
}

TEST(ManyCallsInAnyOrderAreExact) {
  for (int num_ranks = 2; num_ranks <= kMaxTestRanks; ++num_ranks) {
    Gpus gpus({.num_devices = num_ranks, .seed = 7, .max_delay_us = 100});
    CheckInAnyOrder(gpus, num_ranks, {}, 11);
  }
}

}  // namespace
}  // namespace jax_ub

CHECK_MAIN()
