// Random calls of the kernels that store scales of FP8 operands and convert operands, and
// their expected results.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <vector>

#include "cuda/random_kernel_calls.h"
#include "gemm/cuda/fp8_scale_kernels.h"
#include "random_gemm.h"

namespace jax_ub {

// Returns the smallest biased exponent, at least `least`, of a power of two with which
// `amax` does not exceed the largest number of the format.
inline int ExponentAbove(double amax, DType dtype, int least) {
  const double largest = dtype == DType::kE4M3 ? 448 : 57344;
  int exponent = least;
  while (exponent < 254 && amax > std::ldexp(largest, exponent - 127)) ++exponent;
  return exponent;
}

// An FP8 operand [outer, k] of random finite numbers, contiguous along either dimension.
struct RandomFp8 {
  RandomFp8(RandomMatrices& matrices, int64_t num_outer, int64_t k_size)
      : dtype(Pick(matrices.random(), 0, 1) ? DType::kE4M3 : DType::kE5M2),
        outer(num_outer),
        k(k_size),
        values(matrices.AddBytes(outer * k)) {
    const bool is_along_k = Pick(matrices.random(), 0, 1) != 0;
    outer_stride = is_along_k ? k : 1;
    inner_stride = is_along_k ? 1 : outer;
    const int largest = dtype == DType::kE4M3 ? 0x7e : 0x7b;
    for (int64_t i = 0; i < outer * k; ++i) {
      const auto code = static_cast<int>(values[i]);
      values[i] = std::byte((code & 0x80) | std::min(code & 0x7f, largest));
    }
  }

  int64_t At(int64_t o, int64_t i) const { return o * outer_stride + i * inner_stride; }
  float Get(int64_t o, int64_t i) const { return Read(values + At(o, i), dtype); }
  ByteMatrix Bytes(const std::byte* data) const {
    return {DeviceAddressOf(data), outer_stride, inner_stride};
  }
  // Returns the code of a quotient of the number (o, i), with the sign of the number.
  std::byte Rounded(int64_t o, int64_t i, double quotient) const {
    const uint8_t code = F32ToFp8(static_cast<float>(std::abs(quotient)), dtype);
    return std::byte(code) | (values[At(o, i)] & std::byte{0x80});
  }

  DType dtype;
  int64_t outer, k;
  std::byte* values;
  int64_t outer_stride = 0, inner_stride = 0;
};

// Returns the offset of the scale of (o, block) in tiles, by the description in
// cuBLASLt's documentation.
inline int64_t TileOffset(int64_t o, int64_t block, int64_t k) {
  const int64_t tiles_along_k = (k / 32 + 3) / 4;
  const int64_t tile = o / 128 * tiles_along_k + block / 4;
  return 512 * tile + o % 32 * 16 + o % 128 / 32 * 4 + block % 4;
}

// The result has the tiles, then the converted operand.
inline KernelCall<BlockScalesParams> MakeBlockScales(RandomMatrices& matrices) {
  Random& random = matrices.random();
  const bool converts = Pick(random, 0, 1) != 0;
  const RandomFp8 operand(matrices,
                          converts ? 32 * Pick(random, 1, 5) : Pick(random, 1, 300),
                          32 * Pick(random, 1, 6));
  const int64_t outer = operand.outer, k = operand.k, num_blocks = k / 32;
  const int64_t scale_columns = converts ? k : num_blocks;
  std::byte* const scales =
      matrices.AddBytes((converts ? outer / 32 : outer) * scale_columns);
  const int64_t num_scales = (converts ? outer / 32 : outer) * scale_columns;
  // Any scales, or scales close to each other, so that some values are rounded.
  const int64_t center = Pick(random, 0, 254);
  const bool is_any = Pick(random, 0, 2) == 0;
  for (int64_t i = 0; i < num_scales; ++i) {
    const int64_t exponent =
        is_any ? Pick(random, 0, 254) : center + Pick(random, -9, 9);
    scales[i] = std::byte(std::clamp<int64_t>(exponent, 0, 254));
  }
  const int64_t tile_bytes = Fp8ScaleKernels::TileBytes(outer, k);
  KernelCall<BlockScalesParams> call;
  call.out = matrices.AddBytes(tile_bytes + outer * k);
  call.expected.assign(call.out, call.out + tile_bytes + outer * k);
  std::fill_n(call.expected.begin(), tile_bytes, std::byte{0});
  for (int64_t o = 0; o < outer; ++o) {
    for (int64_t block = 0; block < num_blocks; ++block) {
      std::byte& stored = call.expected[TileOffset(o, block, k)];
      if (!converts) {
        stored = scales[o * num_blocks + block];
        continue;
      }
      const auto number = [&](int64_t i) {
        const auto exponent = static_cast<int>(scales[o / 32 * k + i]);
        return std::ldexp(double{operand.Get(o, i)}, exponent - 127);
      };
      double amax = 0;
      for (int64_t i = 32 * block; i < 32 * block + 32; ++i) {
        amax = std::max(amax, std::abs(number(i)));
      }
      const int exponent = ExponentAbove(amax, operand.dtype, 0);
      stored = std::byte(exponent);
      for (int64_t i = 32 * block; i < 32 * block + 32; ++i) {
        call.expected[tile_bytes + operand.At(o, i)] =
            operand.Rounded(o, i, std::ldexp(number(i), 127 - exponent));
      }
    }
  }
  call.params = {.scales = {DeviceAddressOf(scales), scale_columns, 1},
                 .outer = outer,
                 .num_blocks = num_blocks,
                 .to = DeviceAddressOf(call.out),
                 .values = operand.Bytes(operand.values),
                 .converted = operand.Bytes(call.out + tile_bytes),
                 .dtype = operand.dtype,
                 .converts = converts};
  return call;
}

// The result has the converted operand, then the scales of its rows.
inline KernelCall<RowScalesParams> MakeRowScales(RandomMatrices& matrices) {
  Random& random = matrices.random();
  const RandomFp8 operand(matrices, Pick(random, 1, 90), 16 * Pick(random, 1, 40));
  const int64_t outer = operand.outer, k = operand.k;
  std::byte* const scales = matrices.AddBytes(4 * k);
  const bool is_power = Pick(random, 0, 1) != 0;
  for (int64_t i = 0; i < k; ++i) {
    const float factor = is_power ? 1.0f : 1 + static_cast<float>(i % 7) / 9;
    Write(scales + 4 * i, DType::kF32,
          std::ldexp(factor, static_cast<int>(Pick(random, -12, 12))));
  }
  const int64_t num_parts = Fp8ScaleKernels::NumRowParts(k);
  const std::byte* const largest = matrices.AddBytes(4 * outer * num_parts);
  KernelCall<RowScalesParams> call;
  call.out = matrices.AddBytes(outer * k + 4 * outer);
  call.expected.resize(outer * k + 4 * outer);
  for (int64_t o = 0; o < outer; ++o) {
    const auto number = [&](int64_t i) -> double {
      return operand.Get(o, i) * Read(scales + 4 * i, DType::kF32);
    };
    double amax = 0;
    for (int64_t i = 0; i < k; ++i) amax = std::max(amax, std::abs(number(i)));
    const int exponent = ExponentAbove(amax, operand.dtype, 1);
    Write(&call.expected[outer * k + 4 * o], DType::kF32,
          std::ldexp(1.0f, exponent - 127));
    for (int64_t i = 0; i < k; ++i) {
      call.expected[o * k + i] =
          operand.Rounded(o, i, std::ldexp(number(i), 127 - exponent));
    }
  }
  call.params = {.values = operand.Bytes(operand.values),
                 .scales = DeviceAddressOf(scales),
                 .outer = outer,
                 .k = k,
                 .largest = DeviceAddressOf(largest),
                 .to = DeviceAddressOf(call.out + outer * k),
                 .converted = DeviceAddressOf(call.out),
                 .dtype = operand.dtype};
  return call;
}

}  // namespace jax_ub
