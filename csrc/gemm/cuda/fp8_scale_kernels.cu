// Stores the e8m0 scales of FP8 operands in the layout that cuBLASLt reads. Converts
// operands whose scales change along k, to scales of blocks along k or to scales of
// rows.
//
// A conversion multiplies each value by the quotient of its old and its new scale, and
// rounds once, to nearest even. The new scale is the smallest power of two with which
// no value of the block or row exceeds the largest number of the format. Therefore, if
// the old scales are powers of two, a value changes only if it becomes subnormal.

#include <string.h>

#include "gemm/cuda/fp8_scale_params.h"
#include "platform/cuda/instructions.cuh"

namespace jax_ub::gpu {
namespace {

constexpr uint32_t kE8M0Nan = 255;
constexpr int64_t kLargestExponent = 254;
constexpr uint32_t kF32Nan = 0x7fc00000;
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

// Converts the absolute value of an FP8 number to f32, and returns its bits.
__device__ uint32_t WidenMagnitude(uint32_t code, DType dtype) {
  const uint32_t magnitude = code & 0x7f;
  // The bits of an e5m2 are the upper byte of the f16 with the same value.
  if (dtype == DType::kE5M2) return BitsOf(WidenF16(magnitude << 8).x);
  if (magnitude == 0x7f) return 0x7fffffff;
  // The exponent of f16 has one bit more than that of e4m3, so its bias is greater by
  // 8. The factor 2^8 corrects that.
  return BitsOf(WidenF16(magnitude << 7).x * 256);
}

// Rounds a non-negative f32 number, given as its bits, to the nearest FP8 number (ties
// to even), and returns the bits of the result. The number must be infinity, NaN or at
// most the largest FP8 number.
__device__ uint32_t NarrowMagnitude(uint32_t bits, const Fp8Format& format) {
  if (bits == kF32Infinity) return format.infinity;
  if (bits > kF32Infinity) return 0x7f;
  const int shift = kF32MantissaBits - format.mantissa_bits;
  const uint32_t smallest_normal = static_cast<uint32_t>(kF32Bias + 1 - format.bias)
                                   << kF32MantissaBits;
  if (bits < smallest_normal) {
    // One unit in the last place of `anchor` is the smallest subnormal FP8 number.
    // Adding `anchor` therefore rounds to a multiple of it.
    const uint32_t anchor = static_cast<uint32_t>(kF32Bias + 1 - format.bias + shift)
                            << kF32MantissaBits;
    return BitsOf(FromBits(bits) + FromBits(anchor)) - anchor;
  }
  const uint32_t is_odd = bits >> shift & 1;
  const uint32_t rounded = bits + (1u << (shift - 1)) - 1 + is_odd;
  const uint32_t bias = static_cast<uint32_t>(kF32Bias - format.bias);
  return (rounded >> shift) - (bias << format.mantissa_bits);
}

// Multiplies a non-negative f32 number, given as bits, by 2^exponent. Treats subnormal
// f32 numbers as zero.
__device__ uint32_t Scaled(uint32_t bits, int64_t exponent) {
  constexpr int64_t kSmallestNormal = int64_t{1} << kF32MantissaBits;
  if (bits >= kF32Infinity) return bits;
  const int64_t scaled = bits + exponent * kSmallestNormal;
  const bool is_zero = bits < kSmallestNormal || scaled < kSmallestNormal;
  return is_zero ? 0 : static_cast<uint32_t>(scaled);
}

__device__ uint8_t* At(const ByteMatrix& matrix, int64_t outer, int64_t inner) {
  return reinterpret_cast<uint8_t*>(matrix.data) + outer * matrix.outer_stride +
         inner * matrix.inner_stride;
}

// Returns the biased exponent of the smallest power-of-two scale with which number /
// scale does not exceed the largest FP8 number. Returns at least `least`. The number is
// |value| * old scale. `bits` represents it: the f32 bits of |value|, plus 2^23 times
// the biased exponent of the old scale.
__device__ int64_t ExponentAbove(int64_t bits, const Fp8Format& format, int64_t least) {
  constexpr int64_t kOne = int64_t{1} << kF32MantissaBits;
  const int64_t above = bits - format.largest;
  const int64_t exponent = above > 0 ? (above + kOne - 1) / kOne : 0;
  if (exponent < least) return least;
  return exponent < kLargestExponent ? exponent : kLargestExponent;
}

// Converts one block of an operand, 32 elements along k, to values with a common scale.
// Returns this scale as an e8m0 number.
__device__ uint32_t ConvertBlock(const BlockScalesParams& params,
                                 int64_t outer,
                                 int64_t block) {
  const int64_t begin = block * kScaledBlock;
  const int64_t end = begin + kScaledBlock;
  const int64_t row = outer / kScaledBlock;  // of the scales
  // Finds the largest |value| * scale, as f32 bits in an int64_t. `scale` is a biased
  // exponent. Adding it to the exponent field of |value| (bit 23 and up) multiplies by
  // the scale. The exponent field does not overflow in 64 bits, and larger numbers have
  // larger bits.
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
  const int64_t exponent = ExponentAbove(largest, format, 0);
  for (int64_t k = begin; k < end; ++k) {
    const uint32_t code = *At(params.values, outer, k);
    const int64_t quotient = *At(params.scales, row, k) - exponent;  // as exponent
    const uint32_t bits = Scaled(WidenMagnitude(code, params.dtype), quotient);
    *At(params.converted, outer, k) =
        static_cast<uint8_t>((code & 0x80) | NarrowMagnitude(bits, format));
  }
  return is_nan ? kE8M0Nan : static_cast<uint32_t>(exponent);
}

// Returns |value| * scale of an element, as f32 bits.
__device__ uint32_t ScaledMagnitude(const RowScalesParams& params,
                                    int64_t outer,
                                    int64_t k) {
  const uint32_t bits = WidenMagnitude(*At(params.values, outer, k), params.dtype);
  const float scale = reinterpret_cast<const float*>(params.scales)[k];
  return BitsOf(FromBits(bits) * scale) & 0x7fffffff;
}

// The part of a row that a thread reads. Neighboring threads read neighboring rows.
struct RowPart {
  int64_t row;
  int64_t number;
  int64_t begin;
  int64_t end;

  __device__ explicit RowPart(const RowScalesParams& params) {
    const int64_t index = blockIdx.x * int64_t{blockDim.x} + threadIdx.x;
    row = index % params.outer;
    number = index / params.outer;
    begin = number * kRowPart;
    end = begin + kRowPart < params.k ? begin + kRowPart : params.k;
  }
};

}  // namespace

// Each thread block stores one tile of scales, and each thread stores one row of it.
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

// Stores the largest |value| * scale of each part of a row. The maximum of a row with a
// NaN is NaN, because f32 bits are compared, and those of a NaN exceed those of all
// numbers.
extern "C" __global__ void __launch_bounds__(kRowScalesThreads)
    jax_ub_row_amax(const __grid_constant__ RowScalesParams params) {
  const RowPart part(params);
  if (part.begin >= params.k) return;
  uint32_t largest = 0;
  for (int64_t k = part.begin; k < part.end; ++k) {
    const uint32_t bits = ScaledMagnitude(params, part.row, k);
    largest = bits > largest ? bits : largest;
  }
  reinterpret_cast<uint32_t*>(params.largest)[part.number * params.outer + part.row] =
      largest;
}

extern "C" __global__ void __launch_bounds__(kRowScalesThreads)
    jax_ub_convert_rows(const __grid_constant__ RowScalesParams params) {
  const RowPart part(params);
  if (part.begin >= params.k) return;
  const auto* const of_parts = reinterpret_cast<const uint32_t*>(params.largest);
  uint32_t largest = 0;
  for (int64_t number = 0; number * kRowPart < params.k; ++number) {
    const uint32_t bits = of_parts[number * params.outer + part.row];
    largest = bits > largest ? bits : largest;
  }
  const Fp8Format format = FormatOf(params.dtype);
  const int64_t bias = int64_t{kF32Bias} << kF32MantissaBits;
  // The exponent is at least 1, because the scale 2^-127 would be subnormal in f32.
  const int64_t exponent = ExponentAbove(largest + bias, format, 1);
  if (part.number == 0) {
    reinterpret_cast<uint32_t*>(params.to)[part.row] =
        largest > kF32Infinity ? kF32Nan
                               : static_cast<uint32_t>(exponent << kF32MantissaBits);
  }
  auto* const row = reinterpret_cast<char*>(params.converted) + part.row * params.k;
  for (int64_t begin = part.begin; begin < part.end; begin += kRowVector) {
    uint32_t words[kRowVector / 4] = {};
    for (int i = 0; i < kRowVector; ++i) {
      const int64_t k = begin + i;
      const uint32_t sign = *At(params.values, part.row, k) & 0x80;
      const uint32_t bits =
          Scaled(ScaledMagnitude(params, part.row, k), kF32Bias - exponent);
      words[i / 4] |= (sign | NarrowMagnitude(bits, format)) << 8 * (i % 4);
    }
    *reinterpret_cast<uint4*>(row + begin) = {words[0], words[1], words[2], words[3]};
  }
}

}  // namespace jax_ub::gpu
