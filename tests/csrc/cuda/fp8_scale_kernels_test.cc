// Tests the kernels that store scales of FP8 operands and convert operands, on the host.
#include "gemm/cuda/fp8_scale_kernels.h"

#include <cmath>
#include <cstdint>
#include <functional>
#include <vector>

#include "check.h"
#include "cuda/emulated_gpu.h"
#include "cuda/launched_kernels.h"
#include "cuda/random_scale_calls.h"

namespace jax_ub {
namespace {

unsigned NumBlocks(const BlockScalesParams& params) {
  const int64_t k = params.num_blocks * kScaledBlock;
  return static_cast<unsigned>(Fp8ScaleKernels::TileBytes(params.outer, k) /
                               kScaleTileBytes);
}

void Run(const BlockScalesParams& params) {
  Launch(kBlockScalesKernel, params, NumBlocks(params), kBlockScalesThreads);
}

void Run(const RowScalesParams& params) {
  const int64_t num_threads = params.outer * Fp8ScaleKernels::NumRowParts(params.k);
  const auto num_blocks = static_cast<unsigned>(num_threads / kRowScalesThreads + 1);
  Launch(kRowAmaxKernel, params, num_blocks, kRowScalesThreads);
  Launch(kConvertRowsKernel, params, num_blocks, kRowScalesThreads);
}

template <typename Params>
void CheckRandomCalls(KernelCall<Params> (*make)(RandomMatrices&)) {
  for (int seed = 0; seed < 80; ++seed) {
    Random random(seed);
    HostArrays memory;
    RandomMatrices matrices(std::ref(memory), random);
    const KernelCall<Params> call = make(matrices);
    Run(call.params);
    if (!call.IsRight()) check::Fail(__FILE__, __LINE__, "seed ", seed, " differs");
  }
}

TEST(ScalesOfBlocksAreStoredInTilesAndOperandsConvertedByTheFormula) {
  CheckRandomCalls(MakeBlockScales);
}

TEST(RowsAreConvertedByTheFormula) { CheckRandomCalls(MakeRowScales); }

// Operands [64, 64], contiguous along k, whose scales change along k. All values are 1.
struct Operands {
  uint64_t values_at() const { return AddressOf(values.data()); }

  std::vector<uint8_t> OfBlocks(DType dtype) {
    std::vector<uint8_t> tiles(Fp8ScaleKernels::TileBytes(64, 64));
    Run(BlockScalesParams{.scales = {AddressOf(exponents.data()), 64, 1},
                          .outer = 64,
                          .num_blocks = 2,
                          .to = AddressOf(tiles.data()),
                          .values = {values_at(), 64, 1},
                          .converted = {AddressOf(converted.data()), 64, 1},
                          .dtype = dtype,
                          .converts = true});
    return tiles;
  }
  std::vector<float> OfRows(DType dtype) {
    std::vector<float> largest(64), found(64);
    Run(RowScalesParams{.values = {values_at(), 64, 1},
                        .scales = AddressOf(scales.data()),
                        .outer = 64,
                        .k = 64,
                        .largest = AddressOf(largest.data()),
                        .to = AddressOf(found.data()),
                        .converted = AddressOf(converted.data()),
                        .dtype = dtype});
    return found;
  }

  std::vector<uint8_t> values = std::vector<uint8_t>(64 * 64, 0x38);
  std::vector<uint8_t> exponents = std::vector<uint8_t>(2 * 64, 127);
  std::vector<float> scales = std::vector<float>(64, 1.0f);
  std::vector<uint8_t> converted = std::vector<uint8_t>(64 * 64, 0xee);
};

TEST(ZerosHaveTheSmallestScale) {
  Operands operands;
  operands.values.assign(64 * 64, 0);
  operands.values[64] = 0x80;  // -0
  operands.exponents.assign(2 * 64, 200);
  CHECK(operands.OfBlocks(DType::kE4M3) ==
        std::vector<uint8_t>(Fp8ScaleKernels::TileBytes(64, 64)));
  CHECK(operands.converted == operands.values);
  CHECK(operands.OfRows(DType::kE4M3) == std::vector<float>(64, 0x1p-126f));
  CHECK(operands.converted == operands.values);
}

// A NaN reaches the result of its row, and of no other one.
TEST(NanStaysNan) {
  for (const DType dtype : {DType::kE4M3, DType::kE5M2}) {
    Operands operands;
    operands.values[5 * 64 + 40] = 0x7f;
    operands.exponents[64 + 3] = 255;  // rows 32 to 63, k = 3
    const std::vector<uint8_t> tiles = operands.OfBlocks(dtype);
    CHECK_EQ(int{operands.converted[5 * 64 + 40]}, 0x7f);
    for (int64_t o = 0; o < 64; ++o) {
      CHECK_EQ(tiles[TileOffset(o, 0, 64)] == 255, o >= 32);
      CHECK(tiles[TileOffset(o, 1, 64)] < 255);
    }
    const std::vector<float> of_rows = operands.OfRows(dtype);
    for (int64_t o = 0; o < 64; ++o) CHECK_EQ(std::isnan(of_rows[o]), o == 5);
    operands.scales[7] = std::nanf("");
    for (const float scale : operands.OfRows(dtype)) CHECK(std::isnan(scale));
  }
}

TEST(AnInfinityStaysAnInfinity) {
  Operands operands;
  operands.values[6 * 64 + 40] = 0xfc;
  operands.OfBlocks(DType::kE5M2);
  CHECK_EQ(int{operands.converted[6 * 64 + 40]}, 0xfc);
  operands.OfRows(DType::kE5M2);
  CHECK_EQ(int{operands.converted[6 * 64 + 40]}, 0xfc);
}

TEST(OnlyRowsOfWholeVectorsAreConverted) {
  EmulatedMachine machine;
  const EmulatedGpu gpu;
  const Fp8ScaleKernels kernels(EmulatedDriver());
  RowScalesParams params = {};
  params.outer = 1;
  params.k = 40;
  CHECK_THROWS(kernels.ConvertRows(nullptr, params),
               "rows of 40 elements cannot be converted");
}

}  // namespace
}  // namespace jax_ub

CHECK_MAIN()
