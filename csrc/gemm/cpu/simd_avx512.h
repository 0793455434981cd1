// Defines vectors of sixteen f32 with the instructions of AVX512 F, BW, VL and DQ.
//
// tests/csrc/emulated_avx512.h defines the same intrinsics in plain C++, so that unit
// tests can run this code on machines without the instructions.
#pragma once

#ifdef JAX_UB_EMULATE_AVX512
#include "emulated_avx512.h"
#else
// GCC 12 warns about its own intrinsics, which use undefined vectors on purpose.
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#pragma GCC diagnostic ignored "-Wuninitialized"
#include <immintrin.h>
#endif
#include <stdint.h>
#include <string.h>

#include "gemm/cpu/fp8.h"

namespace jax_ub::JAX_UB_KERNELS {

inline constexpr int kLanes = 16;
using Vec = __m512;

inline void Prefetch(const void* p) {
  _mm_prefetch(static_cast<const char*>(p), _MM_HINT_T0);
}
inline Vec Zero() { return _mm512_setzero_ps(); }
inline Vec Load(const void* p) { return _mm512_loadu_ps(p); }
inline void Store(void* p, Vec v) { _mm512_storeu_ps(p, v); }
inline Vec Broadcast(const void* p) {
  float word;  // may also be a pair of bf16, which is aligned to only two bytes
  memcpy(&word, p, sizeof word);
  return _mm512_set1_ps(word);
}
inline Vec Add(Vec a, Vec b) { return _mm512_add_ps(a, b); }
inline Vec Multiply(Vec a, Vec b) { return _mm512_mul_ps(a, b); }
inline Vec MultiplyAdd(Vec a, Vec b, Vec sum) { return _mm512_fmadd_ps(a, b, sum); }

inline __m256i LoadHalves(const void* p) {
  return _mm256_loadu_si256(static_cast<const __m256i*>(p));
}
inline void StoreHalves(void* p, __m256i h) {
  _mm256_storeu_si256(static_cast<__m256i*>(p), h);
}

inline Vec LoadBF16(const void* p) {
  return _mm512_castsi512_ps(
      _mm512_slli_epi32(_mm512_cvtepu16_epi32(LoadHalves(p)), 16));
}

// Rounds f32 to bf16, to nearest even, and stores them. A NaN keeps its sign and
// becomes quiet. Does not use vcvtneps2bf16, which flushes subnormal numbers to zero.
inline void StoreBF16(void* p, Vec v) {
  const __m512i u = _mm512_castps_si512(v);
  const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(u, 16), _mm512_set1_epi32(1));
  const __m512i bias = _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff));
  const __mmask16 nan = _mm512_cmp_ps_mask(v, v, _CMP_UNORD_Q);
  const __m512i rounded = _mm512_mask_or_epi32(_mm512_add_epi32(u, bias), nan, u,
                                               _mm512_set1_epi32(0x400000));
  StoreHalves(p, _mm512_cvtepi32_epi16(_mm512_srli_epi32(rounded, 16)));
}

inline Vec LoadF16(const void* p) { return _mm512_cvtph_ps(LoadHalves(p)); }
inline void StoreF16(void* p, Vec v) {
  StoreHalves(p, _mm512_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
}

// Converts FP8 numbers to bf16. Each number is in the lower byte of a 16-bit lane, the
// upper byte of which is zero.
template <DType kDType>
inline __m512i BF16OfFp8Lanes(__m512i bytes) {
  constexpr Fp8Format kFormat = kFp8Format<kDType>;
  constexpr int kExponentBits = 0x7f >> kFormat.mantissa_bits << kFormat.mantissa_bits;
  const __m512i to_bf16 = _mm512_set1_epi16(kExponentToBF16<kDType>);
  const __m512i magnitude = _mm512_and_si512(bytes, _mm512_set1_epi16(0x7f));
  const __m512i sign =
      _mm512_slli_epi16(_mm512_and_si512(bytes, _mm512_set1_epi16(0x80)), 8);
  __m512i wide = _mm512_add_epi16(
      _mm512_slli_epi16(magnitude, 7 - kFormat.mantissa_bits), to_bf16);
  const __mmask32 is_special =
      _mm512_cmpgt_epi16_mask(magnitude, _mm512_set1_epi16(kFormat.first_special - 1));
  wide = _mm512_mask_add_epi16(wide, is_special, wide, to_bf16);
  // Zero and subnormal numbers are converted by a table of the first 32 numbers, which
  // fits into a vector register.
  const __mmask32 is_subnormal =
      _mm512_testn_epi16_mask(bytes, _mm512_set1_epi16(kExponentBits));
  wide = _mm512_mask_permutexvar_epi16(wide, is_subnormal, magnitude,
                                       _mm512_loadu_si512(kFp8Table<kDType>.bf16));
  return _mm512_or_si512(wide, sign);
}

inline __m512i LoadBytesAsWords(const void* p) {
  return _mm512_cvtepu8_epi32(_mm_loadu_si128(static_cast<const __m128i*>(p)));
}

// Converts FP8 to f32 through f16, whose subnormal numbers are never flushed to zero.
// An e5m2 is the upper half of an f16. The bits of an e4m3, shifted to the position of
// f16's exponent, are an f16 that is 2^8 times too small, so the f32 is multiplied by
// 2^8. Only NaN is converted separately.
template <DType kDType>
inline Vec LoadFp8(const void* p) {
  const __m128i bytes = _mm_loadu_si128(static_cast<const __m128i*>(p));
  const __m256i lanes = _mm256_cvtepi8_epi16(bytes);
  if constexpr (kDType == DType::kE5M2) {
    return _mm512_cvtph_ps(_mm256_slli_epi16(lanes, 8));
  } else {
    static_assert(kDType == DType::kE4M3);
    const __m256i half = _mm256_and_si256(
        _mm256_slli_epi16(lanes, 7), _mm256_set1_epi16(static_cast<int16_t>(0xbf80)));
    const __m128i with_sign =
        _mm_or_si128(bytes, _mm_set1_epi8(static_cast<int8_t>(0x80)));
    const __mmask16 is_number = _mm_cmpneq_epi8_mask(with_sign, _mm_set1_epi8(-1));
    const Vec nan = _mm512_set1_ps(__builtin_nanf(""));
    return _mm512_mask_mul_ps(nan, is_number, _mm512_cvtph_ps(half),
                              _mm512_set1_ps(0x1p8f));
  }
}

// Transposes a 16 x 16 block of words in place. Unpacks first transpose 4 x 4 words
// within each 128-bit quarter: quarter c of u[4 * b + j] then contains rows 4b .. 4b +
// 3 of column 4c + j. Two rounds of shuffles then transpose the 4 x 4 grid of quarters
// (b, c).
inline void Transpose(Vec (&rows)[kLanes]) {
  __m512i t[kLanes];
  for (int i = 0; i < kLanes; i += 2) {
    const __m512i even = _mm512_castps_si512(rows[i]);
    const __m512i odd = _mm512_castps_si512(rows[i + 1]);
    t[i] = _mm512_unpacklo_epi32(even, odd);
    t[i + 1] = _mm512_unpackhi_epi32(even, odd);
  }
  __m512i u[kLanes];
  for (int i = 0; i < kLanes; i += 4) {
    u[i] = _mm512_unpacklo_epi64(t[i], t[i + 2]);
    u[i + 1] = _mm512_unpackhi_epi64(t[i], t[i + 2]);
    u[i + 2] = _mm512_unpacklo_epi64(t[i + 1], t[i + 3]);
    u[i + 3] = _mm512_unpackhi_epi64(t[i + 1], t[i + 3]);
  }
  for (int j = 0; j < 4; ++j) {
    // even_low contains quarters 0 and 2 of u[j] and u[4 + j]; even_high contains the
    // same quarters of u[8 + j] and u[12 + j]. odd_low and odd_high contain quarters 1
    // and 3.
    const __m512i even_low = _mm512_shuffle_i32x4(u[j], u[4 + j], 0x88);
    const __m512i even_high = _mm512_shuffle_i32x4(u[8 + j], u[12 + j], 0x88);
    const __m512i odd_low = _mm512_shuffle_i32x4(u[j], u[4 + j], 0xdd);
    const __m512i odd_high = _mm512_shuffle_i32x4(u[8 + j], u[12 + j], 0xdd);
    rows[j] = _mm512_castsi512_ps(_mm512_shuffle_i32x4(even_low, even_high, 0x88));
    rows[4 + j] = _mm512_castsi512_ps(_mm512_shuffle_i32x4(odd_low, odd_high, 0x88));
    rows[8 + j] = _mm512_castsi512_ps(_mm512_shuffle_i32x4(even_low, even_high, 0xdd));
    rows[12 + j] = _mm512_castsi512_ps(_mm512_shuffle_i32x4(odd_low, odd_high, 0xdd));
  }
}

}  // namespace jax_ub::JAX_UB_KERNELS
