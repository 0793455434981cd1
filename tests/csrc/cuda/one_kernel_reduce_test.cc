// Tests all-reduces in one exchange through the CUDA engine, on emulated GPUs.
#include "engine/cuda/one_kernel_reduce.h"

#include <random>
#include <string>
#include <vector>

#include "check.h"
#include "cuda/captured_calls.h"
#include "cuda/cuda_calls.h"
#include "transport/cuda/all_reduce_params.h"

namespace jax_ub {
namespace {

// The sum of the operands depends on the order and on rounding. It must have the same
// bits as in the two exchanges of a plain all-reduce, on every rank.
void CheckBits(int num_ranks, bool has_addends) {
  Gpus gpus({.num_devices = num_ranks, .seed = 4, .max_delay_us = 30});
  std::vector<std::vector<std::byte>> sums;
  for (const Variant variant : {Variant::kPlain, Variant::kOneShot}) {
    CallAttributes at =
        MakeAttributes(Op::kAllReduce, Method::kRingExchange, num_ranks);
    at.variant = variant;
    at.has_bias = at.has_residual = has_addends;
    GpuCalls calls(gpus, at, {1, 9, 11, 1}, DType::kBF16, 1);
    for (int rank = 0; rank < num_ranks; ++rank) {
      const Tensor& operand = calls.on_device(rank).operands[0];
      auto* numbers = reinterpret_cast<uint16_t*>(operand.data);
      std::mt19937 random(rank);
      for (int64_t e = 0; e < operand.num_elements(); ++e) {
        numbers[e] = static_cast<uint16_t>(0x3c00 + random() % 0x800);
      }
    }
    calls.RunAll();
    gpus.Synchronize();
    for (int rank = 0; rank < num_ranks; ++rank) {
      const Tensor& sum = calls.on_device(rank).results[0];
      sums.emplace_back(sum.data, sum.data + sum.size_bytes());
    }
  }
  for (const std::vector<std::byte>& sum : sums) CHECK(sum == sums[0]);
}

TEST(OneShotSumsAreTheSameBitsOnEveryRankAndInTwoExchanges) {
  for (const int num_ranks : {2, 3, kMaxTestRanks}) {
    CheckBits(num_ranks, /*has_addends=*/false);
    CheckBits(num_ranks, /*has_addends=*/true);
  }
}

// Several blocks, whose last vectors are not full, with bias and residual.
TEST(ManyBlocksAreExactEagerAndReplayed) {
  for (const int num_ranks : {2, 3, kMaxTestRanks}) {
    Gpus gpus({.num_devices = num_ranks, .seed = 6, .max_delay_us = 30});
    for (const Op op : {Op::kMatmulAllReduce, Op::kAllReduce}) {
      for (CallAttributes at : Variants(op, Method::kRingExchange, num_ranks)) {
        at.variant = Variant::kOneShot;
        const int64_t before = gpus.machine.NumCalls(kAllReduceKernel);
        GpuCalls calls(gpus, at, {2, 40, 3, 67}, DType::kBF16, 1);
        calls.RunAll();
        gpus.Synchronize();
        CheckRight(calls);
        CHECK_EQ(gpus.machine.NumCalls(kAllReduceKernel) - before, num_ranks);
        CheckReplays(gpus, calls, 2);
      }
    }
  }
}

TEST(AMissingSumOfAOneShotAllReduceIsNamed) {
  Gpus gpus({.num_devices = 2}, 0.05);
  CallAttributes at = MakeAttributes(Op::kAllReduce, Method::kRingExchange, 2);
  at.variant = Variant::kOneShot;
  GpuCalls calls(gpus, at, {}, DType::kF32, 1);
  for (int rank = 0; rank < 2; ++rank) calls.Initialize(rank);
  calls.Execute(0);
  gpus.Synchronize();
  CHECK_EQ(calls.NumNumbers(0), 0);
  CHECK_THROWS(calls.Execute(0), "for all rows of rank 1 in slot 0");
}

}  // namespace
}  // namespace jax_ub

CHECK_MAIN()
