// Defines vectors of eight f32 with the instructions of AVX2, FMA and F16C.
#pragma once

#include <immintrin.h>
#include <stdint.h>

#include "gemm/cpu/fp8.h"

namespace jax_ub::JAX_UB_KERNELS {

inline constexpr int kLanes = 8;
using Vec = __m256;

inline void Prefetch(const void* p) {
  _mm_prefetch(static_cast<const char*>(p), _MM_HINT_T0);
}
inline Vec Zero() { return _mm256_setzero_ps(); }
inline Vec Load(const void* p) { return _mm256_loadu_ps(static_cast<const float*>(p)); }
inline void Store(void* p, Vec v) { _mm256_storeu_ps(static_cast<float*>(p), v); }
inline Vec Broadcast(const void* p) {
  return _mm256_broadcast_ss(static_cast<const float*>(p));
}
inline Vec Add(Vec a, Vec b) { return _mm256_add_ps(a, b); }
inline Vec Multiply(Vec a, Vec b) { return _mm256_mul_ps(a, b); }
inline Vec MultiplyAdd(Vec a, Vec b, Vec sum) { return _mm256_fmadd_ps(a, b, sum); }

inline Vec LoadBF16(const void* p) {
  const __m128i h = _mm_loadu_si128(static_cast<const __m128i*>(p));
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(h), 16));
}

// Rounds f32 to bf16, to nearest even, and stores them. A NaN keeps its sign and
// becomes quiet.
inline void StoreBF16(void* p, Vec v) {
  const __m256i u = _mm256_castps_si256(v);
  const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(u, 16), _mm256_set1_epi32(1));
  const __m256i bias = _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff));
  const __m256i quiet = _mm256_or_si256(u, _mm256_set1_epi32(0x400000));
  const __m256i nan = _mm256_castps_si256(_mm256_cmp_ps(v, v, _CMP_UNORD_Q));
  const __m256i rounded = _mm256_blendv_epi8(_mm256_add_epi32(u, bias), quiet, nan);
  const __m256i high = _mm256_srli_epi32(rounded, 16);
  const __m256i packed = _mm256_packus_epi32(high, high);  // in each 128-bit half
  const __m256i ordered = _mm256_permute4x64_epi64(packed, 0x08);
  _mm_storeu_si128(static_cast<__m128i*>(p), _mm256_castsi256_si128(ordered));
}

inline Vec LoadF16(const void* p) {
  return _mm256_cvtph_ps(_mm_loadu_si128(static_cast<const __m128i*>(p)));
}
inline void StoreF16(void* p, Vec v) {
  _mm_storeu_si128(static_cast<__m128i*>(p),
                   _mm256_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
}

// Converts FP8 to f32 through f16, whose subnormal numbers are never flushed to zero.
// An e5m2 is the upper half of an f16. The bits of an e4m3, shifted to the position of
// f16's exponent, are an f16 that is 2^8 times too small, so the f32 is multiplied by
// 2^8. Only NaN is converted separately.
template <DType kDType>
inline Vec LoadFp8(const void* p) {
  const __m128i bytes = _mm_loadl_epi64(static_cast<const __m128i*>(p));
  if constexpr (kDType == DType::kE5M2) {
    return _mm256_cvtph_ps(_mm_slli_epi16(_mm_cvtepu8_epi16(bytes), 8));
  } else {
    static_assert(kDType == DType::kE4M3);
    const __m128i magnitude = _mm_set1_epi16(0x3f80);
    const __m128i signed_bytes = _mm_slli_epi16(_mm_cvtepi8_epi16(bytes), 7);
    const __m128i half =
        _mm_and_si128(signed_bytes, _mm_set1_epi16(static_cast<int16_t>(0xbf80)));
    const __m128i is_nan = _mm_cmpeq_epi16(_mm_and_si128(half, magnitude), magnitude);
    const __m128i nan = _mm_and_si128(is_nan, _mm_set1_epi16(0x7e00));
    return _mm256_mul_ps(_mm256_cvtph_ps(_mm_or_si128(half, nan)),
                         _mm256_set1_ps(0x1p8f));
  }
}

// Transposes an 8 x 8 block of words in place: swaps 1 x 1, then 2 x 2, then 4 x 4
// blocks.
inline void Transpose(Vec (&rows)[kLanes]) {
  Vec t[kLanes];
  for (int i = 0; i < kLanes; i += 2) {
    t[i] = _mm256_unpacklo_ps(rows[i], rows[i + 1]);
    t[i + 1] = _mm256_unpackhi_ps(rows[i], rows[i + 1]);
  }
  Vec u[kLanes];
  for (int i = 0; i < kLanes; i += 4) {
    u[i] = _mm256_shuffle_ps(t[i], t[i + 2], 0x44);
    u[i + 1] = _mm256_shuffle_ps(t[i], t[i + 2], 0xee);
    u[i + 2] = _mm256_shuffle_ps(t[i + 1], t[i + 3], 0x44);
    u[i + 3] = _mm256_shuffle_ps(t[i + 1], t[i + 3], 0xee);
  }
  for (int i = 0; i < 4; ++i) {
    rows[i] = _mm256_permute2f128_ps(u[i], u[i + 4], 0x20);
    rows[i + 4] = _mm256_permute2f128_ps(u[i], u[i + 4], 0x31);
  }
}

}  // namespace jax_ub::JAX_UB_KERNELS
