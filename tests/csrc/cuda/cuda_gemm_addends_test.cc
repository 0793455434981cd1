// Tests what a GEMM in device memory adds to the product: biases, residuals, and
// accumulators.
#include <utility>

#include "check.h"
#include "cuda/device_layer.h"
#include "reduce/cuda/sum_params.h"

namespace jax_ub {
namespace {

TEST(bias_and_residual_are_part_of_one_matmul) {
  for (const auto& [dtype, result_dtype] : {std::pair{DType::kBF16, DType::kBF16},
                                            {DType::kF16, DType::kF16},
                                            {DType::kF32, DType::kF32},
                                            {DType::kBF16, DType::kF32}}) {
    Fixture fixture;
    const Layer layer(fixture, 2, 5, 16, 24, dtype, result_dtype);
    const Tensor bias = Layer::Make(fixture, result_dtype, 1, 1, 24);
    const Tensor residual = Layer::Make(fixture, result_dtype, 2, 5, 24);
    GemmProblem problem = layer.All();
    problem.addends = {AddendOf(bias, layer.y, 0), AddendOf(residual, layer.y, 0)};
    problem.scale = 0.5;
    const int64_t before = NumMatmuls();
    fixture.Run(problem);
    CHECK_EQ(NumMatmuls() - before, 1);
    CHECK_EQ(fixture.machine().NumCalls("LaunchKernelEx"), 0);
    for (int64_t m = 0; m < 10; ++m) {
      for (int64_t n = 0; n < 24; ++n) {
        const float expected = layer.Expected(m / 5, m % 5, n) / 2 +
                               Layer::ReadAt(bias, 0, 0, n) +
                               Layer::ReadAt(residual, m / 5, m % 5, n);
        CHECK_EQ(Layer::ReadAt(layer.y, m / 5, m % 5, n), expected);
      }
    }
  }
}

// Shifts the bias or the residual by one element, so that cuBLASLt cannot add it. All
// sums are rounded once: 256 + 1 + 1 is 258 in bf16, and 256 if it is rounded twice.
TEST(what_cublaslt_cannot_add_is_added_before_or_after) {
  struct Case {
    DType result_dtype;
    bool has_bias;
    bool has_residual;
    bool in_place;  // the residual has the memory of the result
    int num_sums;   // launches of jax_ub_sum
  };
  for (const Case& c : {Case{DType::kBF16, true, false, false, 1},
                        {DType::kBF16, false, true, false, 1},
                        {DType::kBF16, true, true, false, 1},
                        {DType::kBF16, true, true, true, 1},
                        {DType::kF32, true, false, false, 1},
                        {DType::kF32, true, true, false, 1},
                        {DType::kF32, true, true, true, 1}}) {
    Fixture fixture;
    const Layer layer(fixture, 1, 5, 1, 24, DType::kBF16, c.result_dtype);
    for (int64_t m = 0; m < 5; ++m) Write(layer.x.At(0, m), DType::kBF16, 16);
    for (int64_t n = 0; n < 24; ++n) Write(layer.w.At(0, 0) + 2 * n, DType::kBF16, 16);
    const int64_t size = SizeOf(c.result_dtype);
    Tensor bias = Layer::Make(fixture, c.result_dtype, 1, 1, 25);
    Tensor residual =
        c.in_place ? layer.y : Layer::Make(fixture, c.result_dtype, 1, 5, 25);
    for (Tensor* addend : {&bias, &residual}) {
      for (int64_t i = 0; i < addend->num_elements(); ++i) {
        Write(addend->data + i * size, c.result_dtype, 1);
      }
    }
    bias.data += size;
    if (!c.in_place) residual.data += size;
    GemmProblem problem = layer.All();
    if (c.has_bias) problem.addends.push_back(AddendOf(bias, layer.y, 0));
    if (c.has_residual) problem.addends.push_back(AddendOf(residual, layer.y, 0));
    const GemmWorkspace workspace = fixture.WorkspaceFor(problem);
    fixture.gemm().Prepare(problem, {}, workspace);
    {
      const EmulatedLaunchesOnly nothing_loads;
      fixture.gemm().Enqueue(problem, {}, workspace, fixture.stream());
      fixture.Synchronize();
    }
    CHECK_EQ(fixture.machine().NumCalls(kSumKernel), c.num_sums);
    const float sum = 256.0f + c.has_bias + c.has_residual;
    for (int64_t i = 0; i < layer.y.num_elements(); ++i) {
      const float expected =
          c.result_dtype == DType::kBF16 && sum == 257 ? 256 : sum;  // to nearest even
      CHECK_EQ(Read(layer.y.data + i * size, c.result_dtype), expected);
    }
  }
}

TEST(an_accumulator_is_added_to_in_place_over_all_terms) {
  Fixture fixture;
  const Layer layer(fixture, 1, 7, 9, 11, DType::kBF16, DType::kF32);
  Layer::Fill(layer.y, 5);
  GemmProblem problem = layer.All(3);
  problem.addends = {AddendOf(layer.y, layer.y, 0)};
  const float before = Layer::ReadAt(layer.y, 0, 3, 4);
  CHECK_EQ(CudaGemm::WorkspaceBytes(problem), kLibraryWorkspaceBytes);
  const int64_t num_matmuls = NumMatmuls();
  fixture.Run(problem);
  CHECK_EQ(NumMatmuls() - num_matmuls, 3);
  CHECK_EQ(fixture.machine().NumCalls("LaunchKernelEx"), 0);
  CHECK_EQ(Layer::ReadAt(layer.y, 0, 3, 4), before + 3 * layer.Expected(0, 3, 4));
}

TEST(pairs_are_rounded_once_with_what_is_added) {
  Fixture fixture;
  const Layer layer(fixture, 1, 4, 1, 8);
  // The bf16 number after 256 is 258. 128 + 128 + 0.75 + 0.75 is 258 if it is rounded
  // once, and 256 if it is rounded after each addition.
  for (int64_t i = 0; i < 4; ++i) Write(layer.x.At(0, i), DType::kBF16, 1);
  for (int64_t n = 0; n < 8; ++n) Write(layer.w.At(0, 0) + 2 * n, DType::kBF16, 128);
  const Tensor bias = Layer::Make(fixture, DType::kF32, 1, 1, 8);
  for (int64_t n = 0; n < 8; ++n) Write(bias.At(0, 0) + 4 * n, DType::kF32, 0.75);
  GemmProblem problem = layer.All(2);
  problem.addends = {AddendOf(bias, layer.y, 0), AddendOf(bias, layer.y, 0)};
  CHECK_EQ(CudaGemm::WorkspaceBytes(problem), kLibraryWorkspaceBytes + 256);
  fixture.Run(problem);
  CHECK_EQ(fixture.machine().NumCalls("LaunchKernelEx"), 1);
  for (int64_t n = 0; n < 8; ++n) {
    CHECK_EQ(Layer::ReadAt(layer.y, 0, 2, n), 258.0f);
  }
}

}  // namespace
}  // namespace jax_ub

CHECK_MAIN()
