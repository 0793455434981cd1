// Quantizes numbers to FP8. The compiler vectorizes the loops over blocks.
#pragma once

#include <string.h>

#include "gemm/cpu/kernels.h"
#include "gemm/cpu/simd_dtypes.h"

namespace jax_ub::JAX_UB_KERNELS {

inline constexpr int32_t kMagnitudeMask = 0x7fffffff;
inline constexpr int32_t kExponentMask = 0x7f800000;
inline constexpr int kSignificandBits = 23;

// Signed integers, because SSE2 has no comparison of unsigned ones.
inline int32_t BitsOf(float x) { return __builtin_bit_cast(int32_t, x); }
inline float FloatOf(int32_t bits) { return __builtin_bit_cast(float, bits); }

// Copies the first `count` of kQuantizeBlock elements. A memcpy of constant size needs no
// call.
template <typename T>
inline void CopyPart(T* to, const T* from, int64_t count) {
  if (count == kQuantizeBlock) {
    memcpy(to, from, kQuantizeBlock * sizeof(T));
  } else {
    memcpy(to, from, count * sizeof(T));
  }
}

// Converts a block to f32. Reads only the first `count` elements of the block, and pads
// them with zeros.
template <DType kFrom>
inline void LoadBlock(const char* from, int64_t count, float (&block)[kQuantizeBlock]) {
  constexpr int64_t kBytes = kElementBytes<kFrom>;
  char padded[kQuantizeBlock * kBytes];
  if (count < kQuantizeBlock) {
    memset(padded, 0, sizeof padded);
    memcpy(padded, from, count * kBytes);
    from = padded;
  }
  for (int i = 0; i < kQuantizeBlock; i += kLanes) {
    Store(block + i, LoadAs<kFrom>(from + i * kBytes));
  }
}

// Clips an f32 number to the range of an FP8 dtype, and rounds it to nearest even.
// Returns the FP8 code. If |x| is added to 2^23 times the distance of the FP8 numbers
// around it, the f32 sum is rounded to a multiple of this distance, which its last bits
// contain.
template <DType kTo>
inline int32_t RoundedToFp8(float x) {
  constexpr Fp8Format kFormat = kFp8Format<kTo>;
  constexpr int32_t kShift = kSignificandBits - kFormat.mantissa_bits;
  // The exponent of the smallest normal FP8 number.
  constexpr int32_t kLeastExponent =
      static_cast<int32_t>(127 + 1 - kFormat.exponent_bias) << kSignificandBits;
  // The largest FP8 number, as an f32.
  constexpr int32_t kLargest = BF16OfFp8<kTo>(kFormat.first_special - 1) << 16;
  // A quiet NaN, whose highest bit of the mantissa is set.
  constexpr int32_t kNan = kFormat.first_special | 1 << (kFormat.mantissa_bits - 1);
  const int32_t bits = BitsOf(x);
  const int32_t magnitude = bits & kMagnitudeMask;
  const int32_t clipped = magnitude < kLargest ? magnitude : kLargest;
  const int32_t exponent_bits = clipped & kExponentMask;
  const int32_t exponent =
      exponent_bits > kLeastExponent ? exponent_bits : kLeastExponent;
  const int32_t addend = exponent + (kShift << kSignificandBits);
  const int32_t multiple = BitsOf(FloatOf(clipped) + FloatOf(addend)) - addend;
  const int32_t rounded = ((exponent - kLeastExponent) >> kShift) + multiple;
  // No branch, because the compiler does not vectorize a branch around an addition.
  const int32_t is_nan = -static_cast<int32_t>(magnitude > kExponentMask);
  const int32_t code = (rounded & ~is_nan) | (kNan & is_nan);
  return code | ((bits >> 24) & 0x80);
}

template <DType kFrom, DType kTo>
void Cast(const void* from,
          int64_t count,
          const float* first,
          const float* second,
          bool per_element,
          uint8_t* out) {
  const char* source = static_cast<const char*>(from);
  for (int64_t done = 0; done < count; done += kQuantizeBlock) {
    const int64_t rest = count - done < kQuantizeBlock ? count - done : kQuantizeBlock;
    float block[kQuantizeBlock];
    LoadBlock<kFrom>(source + done * kElementBytes<kFrom>, rest, block);
    if (per_element) {
      for (int i = 0; i < kQuantizeBlock; ++i) {
        block[i] = block[i] * first[done + i] * second[done + i];
      }
    } else {
      const float factors[] = {*first, *second};
      for (float& x : block) x = x * factors[0] * factors[1];
    }
    // The codes are narrowed at the end. In one loop, the compiler would narrow earlier,
    // and so several numbers of each element.
    int32_t codes[kQuantizeBlock];
    for (int i = 0; i < kQuantizeBlock; ++i) codes[i] = RoundedToFp8<kTo>(block[i]);
    uint8_t bytes[kQuantizeBlock];
    for (int i = 0; i < kQuantizeBlock; ++i) bytes[i] = static_cast<uint8_t>(codes[i]);
    CopyPart(out + done, bytes, rest);
  }
}

template <DType kFrom>
void Amax(
    const void* from, int64_t count, bool per_element, int32_t limit, int32_t* maxima) {
  const char* source = static_cast<const char*>(from);
  int32_t largest[kQuantizeBlock] = {};
  for (int64_t done = 0; done < count; done += kQuantizeBlock) {
    const int64_t rest = count - done < kQuantizeBlock ? count - done : kQuantizeBlock;
    float block[kQuantizeBlock];
    LoadBlock<kFrom>(source + done * kElementBytes<kFrom>, rest, block);
    if (per_element) CopyPart(largest, maxima + done, rest);
    for (int i = 0; i < kQuantizeBlock; ++i) {
      int32_t magnitude = BitsOf(block[i]) & kMagnitudeMask;
      magnitude = magnitude < limit ? magnitude : limit;
      largest[i] = magnitude > largest[i] ? magnitude : largest[i];
    }
    if (per_element) CopyPart(maxima + done, largest, rest);
  }
  if (per_element) return;
  int32_t largest_of_all = *maxima;
  for (int32_t magnitude : largest) {
    largest_of_all = magnitude > largest_of_all ? magnitude : largest_of_all;
  }
  *maxima = largest_of_all;
}

}  // namespace jax_ub::JAX_UB_KERNELS
