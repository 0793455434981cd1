// Words that are pairs of bf16, for AVX512_BF16. Included after simd_avx512.h.
//
// vdpbf16ps adds two products per lane: sum + x[2i] y[2i] + x[2i + 1] y[2i + 1]. It
// treats subnormal operands as zero and flushes subnormal results to zero.
#pragma once

#include "gemm/cpu/kernels.h"

namespace jax_ub::JAX_UB_KERNELS {

inline Vec MultiplyAddPairs(Vec a, Vec b, Vec sum) {
  return _mm512_dpbf16_ps(sum, __builtin_bit_cast(__m512bh, a),
                          __builtin_bit_cast(__m512bh, b));
}

// Returns words with first[i] in the low half and second[i] in the high half of word i.
inline Vec LoadPairs(const void* first, const void* second) {
  const __m512i low = _mm512_cvtepu16_epi32(LoadHalves(first));
  const __m512i high = _mm512_slli_epi32(_mm512_cvtepu16_epi32(LoadHalves(second)), 16);
  return _mm512_castsi512_ps(_mm512_or_si512(low, high));
}

// The `Words` policy of PackCopied and of packing tiles for pairs of bf16: word k
// consists of an element of row 2k and an element of row 2k + 1. See Widened for the
// members.
struct Pairs {
  static constexpr int64_t kBytes = 2;
  static constexpr int64_t kRows = 2;

  static Vec LoadWords(const char* row, int64_t stride) {
    return LoadPairs(row, row + stride);
  }

  static void CopyWord(const char* row, int64_t stride, char* word) {
    memcpy(word, row, 2);
    memcpy(word + 2, row + stride, 2);
  }
};

}  // namespace jax_ub::JAX_UB_KERNELS
