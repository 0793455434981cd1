// Tests the source of the kernels that sum, copy and transpose on the host: sums have
// the CPU engine's bits.

#include <functional>
#include <vector>

#include "check.h"
#include "cuda/launched_kernels.h"
#include "cuda/random_kernel_calls.h"

namespace jax_ub {

// Launches kernels with random grids: fewer threads than there are vectors, or more than
// a row has.
template <typename Params>
void CheckRandomCalls(const char* kernel,
                      KernelCall<Params> (*make)(RandomMatrices&),
                      int num_calls,
                      unsigned num_threads = 0) {
  for (int seed = 0; seed < num_calls; ++seed) {
    Random random(seed);
    HostArrays memory;
    RandomMatrices matrices(std::ref(memory), random);
    const KernelCall<Params> call = make(matrices);
    Launch(kernel, call.params, static_cast<unsigned>(Pick(random, 1, 3)),
           num_threads != 0 ? num_threads : static_cast<unsigned>(Pick(random, 1, 20)));
    if (!call.IsRight()) check::Fail(__FILE__, __LINE__, "seed ", seed, " differs");
  }
}

TEST(sums_are_the_cpu_s_bit_by_bit_and_touch_nothing_else) {
  CheckRandomCalls(kSumKernel, MakeSum, 400);
}

TEST(a_sum_may_be_stored_over_one_of_its_parts) {
  Random random(1);
  HostArrays memory;
  RandomMatrices matrices(std::ref(memory), random);
  for (DType dtype : {DType::kF32, DType::kBF16}) {
    std::byte* own = matrices.Add(64, dtype);
    std::byte* other = matrices.Add(64, dtype);
    SumParams params = {};
    params.num_parts = 2;
    params.is_aligned = true;
    params.rows = 2;
    params.columns = 32;
    params.out = params.parts[0] = {AddressOf(own), 32, dtype};
    params.parts[1] = {AddressOf(other), 32, dtype};
    std::vector<float> expected;
    for (int64_t i = 0; i < 64; ++i) {
      const int64_t at = i * SizeOf(dtype);
      std::byte rounded[4];
      Write(rounded, dtype, Read(own + at, dtype) + Read(other + at, dtype));
      expected.push_back(Read(rounded, dtype));
    }
    Launch(kSumKernel, params, 2, 3);
    for (int64_t i = 0; i < 64; ++i) {
      CHECK_EQ(Read(own + i * SizeOf(dtype), dtype), expected[i]);
    }
  }
}

TEST(a_sum_rejects_a_smaller_alignment_than_declared) {
  alignas(16) float numbers[16] = {};
  SumParams params = {};
  params.num_parts = 1;
  params.is_aligned = true;
  params.rows = 1;
  params.columns = 8;
  params.out = {AddressOf(numbers), 8, DType::kF32};
  params.parts[0] = {AddressOf(numbers + 1), 8, DType::kF32};
  CHECK_THROWS(Launch(kSumKernel, params, 1, 1), "misaligned part of a sum");
}

TEST(copies_move_rows_and_nothing_between_them) {
  CheckRandomCalls(kCopyKernel, MakeCopy, 300);
}

TEST(transpositions_move_every_byte_and_nothing_between_rows) {
  CheckRandomCalls(kTransposeKernel, MakeTranspose, 100, kTransposeThreads);
}

}  // namespace jax_ub

CHECK_MAIN()
