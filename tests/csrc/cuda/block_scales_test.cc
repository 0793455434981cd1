// Tests the kernel that stores scales of blocks for cuBLASLt, and converts operands.
#include "gemm/cuda/block_scales.h"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <vector>

#include "check.h"
#include "cuda/launched_kernels.h"
#include "random_gemm.h"

namespace jax_ub {
namespace {

using Bytes = std::vector<uint8_t>;

constexpr int64_t kGuard = 64;  // bytes behind an array, which are not written
constexpr uint8_t kUnset = 0xee;

// An FP8 operand [outer, k] with scales of blocks along k, or along the outer dimension.
// Either is contiguous, and so are the scales.
struct Operand {
  Operand(int64_t num_outer, int64_t k_size, bool lines_along_k, bool blocks_along_k)
      : outer(num_outer),
        k(k_size),
        is_along_k(blocks_along_k),
        num_scale_rows(is_along_k ? outer : outer / 32),
        num_scale_columns(is_along_k ? k / 32 : k),
        outer_stride(lines_along_k ? k : 1),
        inner_stride(lines_along_k ? 1 : outer),
        values(outer * k),
        scales(num_scale_rows * num_scale_columns),
        converted(outer * k + kGuard, kUnset),
        tiles(BlockScales::SizeBytes(outer, k) + kGuard, kUnset) {}

  int64_t At(int64_t o, int64_t i) const { return o * outer_stride + i * inner_stride; }
  uint8_t ScaleOf(int64_t o, int64_t i) const {
    return is_along_k ? scales[o * num_scale_columns + i / 32]
                      : scales[o / 32 * num_scale_columns + i];
  }
  // The stored scale of (o, block), by the description in cuBLASLt's documentation.
  uint8_t Stored(int64_t o, int64_t block) const {
    const int64_t tiles_along_k = (k / 32 + 3) / 4;
    const int64_t tile = o / 128 * tiles_along_k + block / 4;
    return tiles[512 * tile + o % 32 * 16 + o % 128 / 32 * 4 + block % 4];
  }

  void Run(DType dtype) {
    const BlockScalesParams params = {
        .scales = {AddressOf(scales.data()), num_scale_columns, 1},
        .outer = outer,
        .num_blocks = k / 32,
        .to = AddressOf(tiles.data()),
        .values = {AddressOf(values.data()), outer_stride, inner_stride},
        .converted = {AddressOf(converted.data()), outer_stride, inner_stride},
        .dtype = dtype,
        .converts = !is_along_k};
    const int64_t num_tiles = BlockScales::SizeBytes(outer, k) / kScaleTileBytes;
    Launch(kBlockScalesKernel, params, static_cast<unsigned>(num_tiles),
           kBlockScalesThreads);
    const auto is_unset = [](uint8_t byte) { return byte == kUnset; };
    CHECK(std::all_of(tiles.end() - kGuard, tiles.end(), is_unset));
    CHECK(std::all_of(converted.end() - kGuard, converted.end(), is_unset));
    if (is_along_k) {
      CHECK(std::all_of(converted.begin(), converted.end(), is_unset));
    }
  }
  int64_t NumNonzeroBytes() const {
    return std::count_if(tiles.begin(), tiles.end() - kGuard,
                         [](uint8_t byte) { return byte != 0; });
  }

  const int64_t outer, k;
  const bool is_along_k;
  const int64_t num_scale_rows, num_scale_columns, outer_stride, inner_stride;
  Bytes values, scales, converted, tiles;
};

TEST(ScalesAlongKAreStoredInTilesAndOthersAreZero) {
  for (uint64_t seed = 0; seed < 60; ++seed) {
    Random random(seed);
    Operand operand(Pick(random, 1, 300), 32 * Pick(random, 1, 11), true, true);
    for (uint8_t& scale : operand.scales) scale = Pick(random, 1, 255);
    operand.Run(DType::kE4M3);
    for (int64_t o = 0; o < operand.outer; ++o) {
      for (int64_t b = 0; b < operand.k / 32; ++b) {
        CHECK_EQ(int{operand.Stored(o, b)}, int{operand.ScaleOf(o, 32 * b)});
      }
    }
    CHECK_EQ(operand.NumNonzeroBytes(), operand.outer * operand.k / 32);
  }
}

double NumberOf(uint8_t code, DType dtype) {
  return Read(reinterpret_cast<const std::byte*>(&code), dtype);
}

// Returns the smallest exponent of e8m0 with which `amax` does not exceed the largest
// number of the format.
int ExponentAbove(double amax, DType dtype) {
  const double largest = dtype == DType::kE4M3 ? 448 : 57344;
  int exponent = 0;
  while (exponent < 254 && amax > std::ldexp(largest, exponent - 127)) ++exponent;
  return exponent;
}

// Compares a converted operand with the formula, for finite values and scales.
void CheckConverted(const Operand& operand, DType dtype) {
  for (int64_t o = 0; o < operand.outer; ++o) {
    for (int64_t b = 0; b < operand.k / 32; ++b) {
      double numbers[32];
      double amax = 0;
      for (int i = 0; i < 32; ++i) {
        const int64_t k = 32 * b + i;
        numbers[i] = std::ldexp(NumberOf(operand.values[operand.At(o, k)], dtype),
                                operand.ScaleOf(o, k) - 127);
        amax = std::max(amax, std::abs(numbers[i]));
      }
      const int exponent = ExponentAbove(amax, dtype);
      CHECK_EQ(int{operand.Stored(o, b)}, exponent);
      for (int i = 0; i < 32; ++i) {
        const auto quotient =
            static_cast<float>(std::ldexp(numbers[i], 127 - exponent));
        const int64_t at = operand.At(o, 32 * b + i);
        uint8_t expected = F32ToFp8(quotient, dtype);
        if (operand.values[at] & 0x80) expected |= 0x80;
        CHECK_EQ(int{operand.converted[at]}, int{expected});
      }
    }
  }
}

bool IsFinite(uint8_t code, DType dtype) {
  return (code & 0x7f) <= (dtype == DType::kE4M3 ? 0x7e : 0x7b);
}

TEST(OperandsAreConvertedByTheFormulaAndRoundedOnce) {
  for (uint64_t seed = 0; seed < 24; ++seed) {
    Random random(seed);
    const DType dtype = seed % 2 == 0 ? DType::kE4M3 : DType::kE5M2;
    Operand operand(32 * Pick(random, 1, 5), 32 * Pick(random, 1, 6), seed % 4 < 2,
                    false);
    for (uint8_t& code : operand.values) {
      do code = Pick(random, 0, 255);
      while (!IsFinite(code, dtype));
    }
    // Scales that are close to each other, so that values become subnormal and are
    // rounded, or any scales.
    const int64_t center = Pick(random, 0, 254);
    for (uint8_t& scale : operand.scales) {
      scale = seed % 3 == 0 ? Pick(random, 0, 254)
                            : std::clamp<int64_t>(center + Pick(random, -9, 9), 0, 254);
    }
    operand.Run(dtype);
    CheckConverted(operand, dtype);
  }
}

TEST(ABlockOfZerosHasTheSmallestScale) {
  Operand operand(32, 32, true, false);
  std::ranges::fill(operand.scales, 200);
  operand.values[operand.At(3, 4)] = 0x80;  // -0
  operand.Run(DType::kE4M3);
  CheckConverted(operand, DType::kE4M3);
  CHECK_EQ(operand.NumNonzeroBytes(), 0);
}

// A NaN must reach the result, and must not change other rows.
TEST(NanStaysNan) {
  for (const DType dtype : {DType::kE4M3, DType::kE5M2}) {
    Operand operand(64, 64, true, false);
    std::ranges::fill(operand.values, 0x39);
    std::ranges::fill(operand.scales, 127);
    operand.values[operand.At(5, 40)] = 0x7f;
    operand.scales[operand.num_scale_columns + 3] = 255;  // rows 32 to 63, k = 3
    operand.Run(dtype);
    CHECK_EQ(int{operand.converted[operand.At(5, 40)]}, 0x7f);
    for (int64_t o = 0; o < 64; ++o) {
      CHECK_EQ(operand.Stored(o, 0) == 255, o >= 32);
      CHECK(operand.Stored(o, 1) < 255);
    }
    if (dtype == DType::kE4M3) continue;
    operand.values[operand.At(6, 40)] = 0xfc;  // -infinity
    operand.Run(dtype);
    CHECK_EQ(int{operand.converted[operand.At(6, 40)]}, 0xfc);
  }
}

}  // namespace
}  // namespace jax_ub

CHECK_MAIN()
