// Tests FP8 calls through the CUDA engine, on emulated GPUs.
#include <string>
#include <vector>

#include "check.h"
#include "cuda/captured_calls.h"
#include "cuda/cuda_calls.h"
#include "gemm/cuda/fp8_scale_params.h"
#include "gemm/cuda/fp8_support.h"
#include "platform/error.h"

namespace jax_ub {
namespace {

// Sizes that FP8 GEMMs support. Forward passes may have any number of rows.
constexpr jax_ub_test::Sizes kSizes = {2, 16, 32, 16, 16};
constexpr jax_ub_test::Sizes kFewRows = {1, 3, 48, 32, 16};

EmulatedOptions Machine(int num_devices, const ComputeCapability& capability) {
  EmulatedOptions options = {.num_devices = num_devices, .max_delay_us = 30};
  options.attributes = {
      {CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR, capability.major},
      {CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR, capability.minor}};
  return options;
}

// Calls `function` with every FP8 call of P ranks. Sizes and dtypes alternate.
template <typename Function>
void ForEachFp8Call(int num_ranks, const Function& function) {
  int seed = 0;
  ForEachVariant(num_ranks, [&](CallAttributes at) {
    const GemmKind gemm = InfoOf(at.op).gemm;
    if (gemm == GemmKind::kNone) return;
    at.has_scales = true;
    ++seed;
    const bool has_any_rows = gemm != GemmKind::kWgrad;
    function(at, has_any_rows && seed % 3 == 0 ? kFewRows : kSizes,
             seed % 2 == 0 ? DType::kE4M3 : DType::kE5M2, seed);
  });
}

// On 9.0 all operands that cuBLASLt does not read are transposed, on 10.0 none.
TEST(EveryFp8CallByEveryMethodIsExact) {
  for (const ComputeCapability capability : {ComputeCapability{9, 0}, {10, 0}}) {
    for (const int num_ranks : {1, 3}) {
      Gpus gpus(Machine(num_ranks, capability));
      ForEachFp8Call(num_ranks, [&](CallAttributes at, const jax_ub_test::Sizes& sizes,
                                    DType dtype, int seed) {
        at.kernel_options.transposes_fp8 = NeedsContiguousFp8(capability);
        GpuCalls calls(gpus, at, sizes, dtype, seed);
        calls.RunAll();
        gpus.Synchronize();
        CheckRight(calls);
      });
      CHECK_EQ(gpus.machine.NumCalls(kTransposeKernel) > 0,
               NeedsContiguousFp8(capability));
    }
  }
}

TEST(CapturedFp8CallsAreExactWheneverTheyAreReplayed) {
  Gpus gpus(Machine(2, {9, 0}));
  ForEachFp8Call(2, [&](const CallAttributes& at, const jax_ub_test::Sizes& sizes,
                        DType dtype, int seed) {
    GpuCalls calls(gpus, at, sizes, dtype, seed);
    CheckReplays(gpus, calls, 100 * seed);
  });
}

// Cross-checks row scales of all ops. Forward passes have them along the dimensions that
// are not contracted; gradients convert operands.
TEST(CallsWithScalesOfRowsAreExact) {
  for (int num_ranks = 1; num_ranks <= 4; ++num_ranks) {
    Gpus gpus(Machine(num_ranks, {9, 0}));
    ForEachFp8Call(num_ranks, [&](CallAttributes at, const jax_ub_test::Sizes&,
                                  DType dtype, int seed) {
      at.has_row_scales = true;
      GpuCalls calls(gpus, at, kSizes, dtype, seed);
      calls.RunAll();
      gpus.Synchronize();
      CheckRight(calls);
    });
    CHECK(gpus.machine.NumCalls(kConvertRowsKernel) > 0);
  }
}

// Sizes of operands with blocks of 32 along any dimension.
constexpr jax_ub_test::Sizes kBlocks = {2, 16, 64, 32, 32};

// Cross-checks scales of blocks in all ops. Forward passes read them along the
// contracted dimension; gradients convert operands.
TEST(CallsWithScalesOfBlocksAreExact) {
  for (int num_ranks = 1; num_ranks <= 4; ++num_ranks) {
    Gpus gpus(Machine(num_ranks, {10, 0}));
    ForEachFp8Call(num_ranks, [&](CallAttributes at, const jax_ub_test::Sizes&,
                                  DType dtype, int seed) {
      at.has_row_scales = true;
      at.kernel_options.transposes_fp8 = false;
      GpuCalls calls(gpus, at, kBlocks, dtype, seed, {}, /*has_blocks=*/true);
      calls.RunAll();
      gpus.Synchronize();
      CheckRight(calls);
    });
    CHECK(gpus.machine.NumCalls(kBlockScalesKernel) > 0);
    CHECK_EQ(gpus.machine.NumCalls(kTransposeKernel), 0);
  }
}

TEST(CapturedCallsWithScalesOfBlocksAreExactWheneverTheyAreReplayed) {
  Gpus gpus(Machine(2, {10, 0}));
  ForEachFp8Call(
      2, [&](CallAttributes at, const jax_ub_test::Sizes&, DType dtype, int seed) {
        if (seed % 4 != 0) return;
        at.has_row_scales = true;
        GpuCalls calls(gpus, at, kBlocks, dtype, seed, {}, /*has_blocks=*/true);
        CheckReplays(gpus, calls, 100 * seed);
      });
}

// Forward passes may have any number of rows; scales of 128 rows share a tile.
TEST(ScalesOfBlocksOfAnyNumberOfRowsAreStored) {
  for (const int64_t rows : {1, 3, 130}) {
    for (const Op op : {Op::kAllGatherMatmul, Op::kMatmulAllReduce}) {
      CallAttributes at = MakeAttributes(op, Method::kRingExchange, 2);
      at.has_scales = at.has_row_scales = true;
      Gpus gpus(Machine(2, {10, 3}));
      GpuCalls calls(gpus, at, {1, rows, 32, 160, 32}, DType::kE4M3, 1, {},
                     /*has_blocks=*/true);
      calls.RunAll();
      gpus.Synchronize();
      CheckRight(calls);
    }
  }
}

std::string WorkspaceErrorOf(CallAttributes at,
                             const jax_ub_test::Sizes& sizes,
                             bool has_blocks = false) {
  Gpus gpus(Machine(1, {has_blocks ? 10 : 9, 0}));
  at.has_scales = at.has_row_scales = true;
  GpuCalls calls(gpus, at, sizes, DType::kE4M3, 1, {}, has_blocks);
  try {
    calls.Workspace(0);
  } catch (const UnsupportedError& error) {
    return error.what();
  }
  return "";
}

TEST(ScalesThatCuBlasLtCannotMultiplyAreRefusedBeforeACallIsCompiled) {
  CallAttributes at = MakeAttributes(Op::kMatmul, Method::kDirect, 1);
  CHECK_EQ(WorkspaceErrorOf(at, kSizes), "");
  at = MakeAttributes(Op::kWgrad, Method::kRingExchange, 1);
  CHECK_EQ(WorkspaceErrorOf(at, kSizes), "");
  // The second batch begins at an odd row.
  at = MakeAttributes(Op::kAllGatherMatmul, Method::kRingExchange, 1);
  CHECK(WorkspaceErrorOf(at, {2, 5, 32, 16, 16})
            .find("Use a multiple of 16 rows per rank") != std::string::npos);
  at = MakeAttributes(Op::kMatmul, Method::kDirect, 1);
  at.has_scales = at.has_row_scales = true;
  Gpus gpus(Machine(1, {9, 0}));
  GpuCalls calls(gpus, at, kSizes, DType::kE4M3, 1);
  RankCall mixed = calls.on_device(0);
  mixed.scales[1].features = 1;
  const std::string text =
      "row scales on GPUs need a scale for each row of x and each column of w";
  CHECK_THROWS(CudaEngine::WorkspaceBytes(at, mixed), text);
  // Only one of two kernels has a scale for each column.
  at.num_kernels = 2;
  GpuCalls pairs(gpus, at, kSizes, DType::kE4M3, 1);
  mixed = pairs.on_device(0);
  CudaEngine::WorkspaceBytes(at, mixed);
  mixed.scales[2].features = 1;
  CHECK_THROWS(CudaEngine::WorkspaceBytes(at, mixed), text);
}

TEST(OperandsWithoutWholeBlocksAreRefusedBeforeACallIsCompiled) {
  CallAttributes at = MakeAttributes(Op::kWgrad, Method::kRingExchange, 1);
  CHECK_EQ(WorkspaceErrorOf(at, kBlocks, true), "");
  CHECK(WorkspaceErrorOf(at, {1, 16, 64, 32, 32}, true)
            .find("MXFP8 on GPUs contracts multiples of 32 rows or features, and 16 is "
                  "none") != std::string::npos);
  at = MakeAttributes(Op::kMatmul, Method::kDirect, 1);
  at.has_scales = at.has_row_scales = true;
  Gpus gpus(Machine(1, {10, 0}));
  GpuCalls calls(gpus, at, kBlocks, DType::kE4M3, 1, {}, true);
  RankCall mixed = calls.on_device(0);
  mixed.scales[1] = {DType::kF32, 1, 1, 32, mixed.scales[1].data};
  CHECK_THROWS(CudaEngine::WorkspaceBytes(at, mixed),
               "MXFP8 on GPUs needs scales of blocks of both operands");
}

std::string ErrorOf(const CallAttributes& at,
                    const ComputeCapability& capability,
                    const jax_ub_test::Sizes& sizes = kSizes) {
  Gpus gpus(Machine(1, capability));
  GpuCalls calls(gpus, at, sizes, DType::kE4M3, 1);
  try {
    calls.Initialize(0);
  } catch (const std::exception& error) {
    return error.what();
  }
  return "";
}

TEST(DevicesWithoutTheseFp8GemmsRefuseThem) {
  CallAttributes at = MakeAttributes(Op::kMatmul, Method::kDirect, 1);
  at.has_scales = true;
  CHECK_EQ(ErrorOf(at, {8, 9}), "");
  CHECK_EQ(ErrorOf(at, {12, 0}), "");
  CHECK_EQ(ErrorOf(at, {8, 6}),
           "jax_ub.matmul (ub_name 'test'): FP8 needs a GPU of compute capability 8.9 "
           "or newer; this is 8.6");
  // The kernel is [in, out], which is not contiguous along the contracted dimension.
  at.kernel_options.transposes_fp8 = false;
  CHECK_EQ(ErrorOf(at, {10, 3}), "");
  for (const ComputeCapability capability :
       {ComputeCapability{8, 9}, {9, 0}, {12, 0}}) {
    const std::string text = ErrorOf(at, capability);
    CHECK(text.find("has no algorithm for e4m3[") != std::string::npos);
  }
  at.kernel_options.transposes_fp8 = true;
  const std::string text = ErrorOf(at, {9, 0}, {1, 16, 24, 16});
  CHECK(text.find("has no algorithm for e4m3[16, 24] x e4m3[24, 16] to bf16") !=
        std::string::npos);
}

TEST(ScalesOfRowsNeedHopperAndANewLibrary) {
  const std::string needs =
      "row scales need a GPU of compute capability 9.0 and cuBLASLt 12.9; this is ";
  const std::string instead = ". Use a recipe with one scale per tensor";
  CHECK_EQ(WhyNoFp8("row", {9, 0}, 120900), "");
  CHECK_EQ(WhyNoFp8("row", {9, 0}, 0), "");
  CHECK_EQ(WhyNoFp8("row", {9, 0}, 120805), needs + "9.0 and 12.8.5" + instead);
  CHECK_EQ(WhyNoFp8("row", {10, 0}, 130000), needs + "10.0" + instead);
}

TEST(ScalesOfBlocksNeedBlackwellAndANewLibrary) {
  const std::string needs =
      "MXFP8 needs a GPU of compute capability 10.x or 11.0 and cuBLASLt 12.9; this "
      "is ";
  const std::string instead = ". Use a recipe with one scale per tensor";
  for (const ComputeCapability device : {ComputeCapability{10, 0}, {10, 3}, {11, 0}}) {
    CHECK_EQ(WhyNoFp8("block", device, 120900), "");
    CHECK_EQ(WhyNoFp8("block", device, 0), "");
  }
  CHECK_EQ(WhyNoFp8("block", {10, 0}, 120803), needs + "10.0 and 12.8.3" + instead);
  CHECK_EQ(WhyNoFp8("block", {9, 0}, 130000), needs + "9.0" + instead);
  CHECK_EQ(WhyNoFp8("block", {12, 0}, 130000), needs + "12.0" + instead);
}

TEST(Fp8NeedsANewLibraryOnAda) {
  const ComputeCapability ada = {8, 9};
  CHECK_EQ(WhyNoFp8("tensor", ada, 120103), "");
  CHECK_EQ(WhyNoFp8("tensor", ada, 120100),
           "FP8 on a GPU of compute capability 8.9 needs cuBLASLt 12.1.3; this is "
           "12.1.0");
  CHECK_EQ(WhyNoFp8("tensor", {9, 0}, 120000), "");
}

}  // namespace
}  // namespace jax_ub

CHECK_MAIN()
