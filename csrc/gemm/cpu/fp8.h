// Describes the FP8 formats, and converts FP8 numbers to bf16. The conversion is exact.
#pragma once

// Only C headers are included, because files for different instruction sets include
// this header. The linker may merge inline functions of C++ headers across these files,
// and a CPU would then run instructions that it lacks.
#include <stdint.h>

#include "gemm/dtype.h"

namespace jax_ub::JAX_UB_KERNELS {

// Layout of an FP8 number: one sign bit, then 7 bits of exponent and mantissa.
struct Fp8Format {
  int mantissa_bits;
  int exponent_bias;
  int first_special;  // magnitudes from here on are infinite or NaN
};

template <DType kDType>
inline constexpr Fp8Format kFp8Format = {};
template <>
inline constexpr Fp8Format kFp8Format<DType::kE4M3> = {3, 7, 0x7f};
template <>
inline constexpr Fp8Format kFp8Format<DType::kE5M2> = {2, 15, 0x7c};

// Difference between the exponent biases of bf16 and FP8, shifted to the bits of a bf16
// that contain its exponent.
template <DType kDType>
inline constexpr int kExponentToBF16 = (127 - kFp8Format<kDType>.exponent_bias) << 7;

// Converts an FP8 number to the bf16 with the same value. A NaN becomes a NaN.
template <DType kDType>
constexpr uint16_t BF16OfFp8(uint8_t bits) {
  constexpr Fp8Format kFormat = kFp8Format<kDType>;
  const int magnitude = bits & 0x7f;
  int wide = (magnitude << (7 - kFormat.mantissa_bits)) + kExponentToBF16<kDType>;
  if (magnitude >= kFormat.first_special) wide += kExponentToBF16<kDType>;
  if (magnitude < 1 << kFormat.mantissa_bits) {  // zero or subnormal
    int exponent = 127 + 1 - kFormat.exponent_bias - kFormat.mantissa_bits;
    int fraction = magnitude << 7;
    while (fraction >= 1 << 8) {
      fraction >>= 1;
      ++exponent;
    }
    wide = magnitude == 0 ? 0 : (exponent << 7) + (fraction & 0x7f);
  }
  return static_cast<uint16_t>(wide | (bits & 0x80) << 8);
}

struct Fp8Table {
  uint16_t bf16[256];
};

// The bf16 with the same value as each of the 256 FP8 numbers, indexed by the bits of
// the FP8 number.
template <DType kDType>
inline constexpr Fp8Table kFp8Table = [] {
  Fp8Table table = {};
  for (int i = 0; i < 256; ++i) {
    table.bf16[i] = BF16OfFp8<kDType>(static_cast<uint8_t>(i));
  }
  return table;
}();

// Two lookup tables that convert FP8 to bf16: the upper and the lower byte of the bf16
// number, indexed by the FP8 code without its sign bit.
struct Fp8Bytes {
  uint8_t upper[128];
  uint8_t lower[128];
};

template <DType kDType>
inline constexpr Fp8Bytes kFp8Bytes = [] {
  Fp8Bytes bytes = {};
  for (int i = 0; i < 128; ++i) {
    bytes.upper[i] = static_cast<uint8_t>(kFp8Table<kDType>.bf16[i] >> 8);
    bytes.lower[i] = static_cast<uint8_t>(kFp8Table<kDType>.bf16[i]);
  }
  return bytes;
}();

}  // namespace jax_ub::JAX_UB_KERNELS
