// Stores the e8m0 scales of FP8 operands as cuBLASLt reads them, and converts operands
// whose blocks are along the other dimension.
//
// A conversion multiplies each value by a power of two, the quotient of its old and its
// new scale, and rounds once, to nearest even. The new scale is the smallest one with
// which no value of the block exceeds the largest number of the format. Therefore a
// value changes only if it becomes subnormal.

#include <string.h>

#include "gemm/cuda/block_scales_params.h"
#include "platform/cuda/instructions.cuh"

namespace jax_ub::gpu {
namespace {

constexpr uint32_t kE8M0Nan = 255;
constexpr int64_t kLargestExponent = 254;
constexpr int kF32MantissaBits = 23;
constexpr int kF32Bias = 127;
constexpr uint32_t kF32Infinity = 0x7f800000;

struct Fp8Format {
  int mantissa_bits;
  int bias;
  uint32_t largest;   // the largest number, as f32 bits
  uint32_t infinity;  // the code of infinity, or of NaN in a format without infinity
};

__device__ Fp8Format FormatOf(DType dtype) {
  if (dtype == DType::kE4M3) return {3, 7, 0x43e00000, 0x7f};
  return {2, 15, 0x47600000, 0x7c};
}

__device__ uint32_t BitsOf(float value) {
  uint32_t bits;
  memcpy(&bits, &value, sizeof(bits));
  return bits;
}

__device__ float FromBits(uint32_t bits) {
  float value;
  memcpy(&value, &bits, sizeof(value));
  return value;
}

// Returns the f32 bits of the absolute value of an FP8 code.
__device__ uint32_t WidenMagnitude(uint32_t code, DType dtype) {
  const uint32_t magnitude = code & 0x7f;
  // An e5m2 code is the upper byte of an f16 number.
  if (dtype == DType::kE5M2) return BitsOf(WidenF16(magnitude << 8).x);
  if (magnitude == 0x7f) return 0x7fffffff;
  // The exponent of f16 has one more bit, so its bias is greater by 8.
  return BitsOf(WidenF16(magnitude << 7).x * 256);
}

// Rounds a non-negative f32 number, as bits, to an FP8 code. It must not exceed the
// largest number of the format, unless it is infinity or NaN.
__device__ uint32_t NarrowMagnitude(uint32_t bits, const Fp8Format& format) {
  if (bits == kF32Infinity) return format.infinity;
  if (bits > kF32Infinity) return 0x7f;
  const int shift = kF32MantissaBits - format.mantissa_bits;
  const uint32_t smallest_normal = static_cast<uint32_t>(kF32Bias + 1 - format.bias)
                                   << kF32MantissaBits;
  if (bits < smallest_normal) {
    // The last place of `anchor` is the smallest subnormal number of the format, so the
    // addition rounds to a multiple of it.
    const uint32_t anchor = static_cast<uint32_t>(kF32Bias + 1 - format.bias + shift)
                            << kF32MantissaBits;
    return BitsOf(FromBits(bits) + FromBits(anchor)) - anchor;
  }
  const uint32_t is_odd = bits >> shift & 1;
  const uint32_t rounded = bits + (1u << (shift - 1)) - 1 + is_odd;
  const uint32_t bias = static_cast<uint32_t>(kF32Bias - format.bias);
  return (rounded >> shift) - (bias << format.mantissa_bits);
}

// Multiplies a non-negative f32 number, as bits, by 2^exponent. Returns 0 instead of a
// subnormal f32 number.
__device__ uint32_t Scaled(uint32_t bits, int64_t exponent) {
  if (bits == 0 || bits >= kF32Infinity) return bits;
  const int64_t scaled =
      static_cast<int64_t>(bits) + exponent * (int64_t{1} << kF32MantissaBits);
  return scaled < (int64_t{1} << kF32MantissaBits) ? 0 : static_cast<uint32_t>(scaled);
}

__device__ uint8_t* At(const ByteMatrix& matrix, int64_t outer, int64_t inner) {
  return reinterpret_cast<uint8_t*>(matrix.data) + outer * matrix.outer_stride +
         inner * matrix.inner_stride;
}

// Converts one block of an operand. Returns its scale.
__device__ uint32_t ConvertBlock(const BlockScalesParams& params,
                                 int64_t outer,
                                 int64_t block) {
  const int64_t begin = block * kScaledBlock;
  const int64_t end = begin + kScaledBlock;
  const int64_t row = outer / kScaledBlock;  // of the scales
  // |value| * scale is ordered as bits(|value|) + scale * 2^23.
  int64_t largest = 0;
  bool is_nan = false;
  for (int64_t k = begin; k < end; ++k) {
    const uint32_t bits = WidenMagnitude(*At(params.values, outer, k), params.dtype);
    const uint32_t scale = *At(params.scales, row, k);
    is_nan = is_nan || scale == kE8M0Nan;
    if (bits == 0) continue;
    const int64_t scaled = bits + (int64_t{scale} << kF32MantissaBits);
    largest = scaled > largest ? scaled : largest;
  }
  const Fp8Format format = FormatOf(params.dtype);
  constexpr int64_t kOne = int64_t{1} << kF32MantissaBits;
  int64_t exponent = 0;
  if (largest > format.largest) exponent = (largest - format.largest + kOne - 1) / kOne;
  if (exponent > kLargestExponent) exponent = kLargestExponent;
  for (int64_t k = begin; k < end; ++k) {
    const uint32_t code = *At(params.values, outer, k);
    const int64_t quotient = *At(params.scales, row, k) - exponent;  // as exponent
    const uint32_t bits = Scaled(WidenMagnitude(code, params.dtype), quotient);
    *At(params.converted, outer, k) =
        static_cast<uint8_t>((code & 0x80) | NarrowMagnitude(bits, format));
  }
  return is_nan ? kE8M0Nan : static_cast<uint32_t>(exponent);
}

}  // namespace

// Each block of threads stores a tile of scales, each thread those of one row.
extern "C" __global__ void __launch_bounds__(kBlockScalesThreads)
    jax_ub_block_scales(const __grid_constant__ BlockScalesParams params) {
  const int64_t tile = blockIdx.x;
  const int64_t row = threadIdx.x;
  const int64_t tiles_per_row =
      (params.num_blocks + kScaleTileBlocks - 1) / kScaleTileBlocks;
  const int64_t outer = tile / tiles_per_row * kScaleTileRows + row;
  const int64_t first = tile % tiles_per_row * kScaleTileBlocks;
  uint32_t word = 0;
  for (int i = 0; i < kScaleTileBlocks; ++i) {
    const int64_t block = first + i;
    if (outer >= params.outer || block >= params.num_blocks) break;
    const uint32_t scale = params.converts ? ConvertBlock(params, outer, block)
                                           : *At(params.scales, outer, block);
    word |= scale << 8 * i;
  }
  *reinterpret_cast<uint32_t*>(params.to + tile * kScaleTileBytes + row % 32 * 16 +
                               row / 32 * 4) = word;
}

}  // namespace jax_ub::gpu
