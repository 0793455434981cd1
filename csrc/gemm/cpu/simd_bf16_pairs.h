// Words that are pairs of bf16, for AVX512_BF16. Included after simd_avx512.h.
//
// vdpbf16ps adds two products per lane: sum + x[2i] y[2i] + x[2i + 1] y[2i + 1]. It takes
// subnormal operands as zero and flushes subnormal results.
#pragma once

#include "gemm/cpu/kernels.h"

namespace jax_ub::JAX_UB_KERNELS {

inline Vec MultiplyAddPairs(Vec a, Vec b, Vec sum) {
  return _mm512_dpbf16_ps(sum, __builtin_bit_cast(__m512bh, a),
                          __builtin_bit_cast(__m512bh, b));
}

// Word i is first[i] in its low half and second[i] in its high one.
inline Vec LoadPairs(const void* first, const void* second) {
  const __m512i low = _mm512_cvtepu16_epi32(LoadHalves(first));
  const __m512i high = _mm512_slli_epi32(_mm512_cvtepu16_epi32(LoadHalves(second)), 16);
  return _mm512_castsi512_ps(_mm512_or_si512(low, high));
}

// The source is contiguous along the outer dimension; `stride` is that of one k. As
// PackCopied, with the word (o, k) made of rows 2k and 2k + 1.
template <int kPanel>
void PackCopiedPairs(
    const void* source, int64_t stride, int64_t outer, int64_t num_words, void* panel) {
  constexpr int64_t kRowBytes = int64_t{4} * kPanel;
  const char* from = static_cast<const char*>(source);
  char* to = static_cast<char*>(panel);
  for (int64_t k = 0; k < num_words; ++k, from += 2 * stride, to += kRowBytes) {
    const bool whole = outer == kPanel && k < num_words - kHeldBack<kPanel>;
    const int64_t limit = whole ? outer : outer / kLanes * kLanes;
    int64_t o = 0;
    for (; o < limit; o += kLanes) {
      Store(to + 4 * o, LoadPairs(from + 2 * o, from + stride + 2 * o));
    }
    for (; o < outer; ++o) {
      memcpy(to + 4 * o, from + 2 * o, 2);
      memcpy(to + 4 * o + 2, from + stride + 2 * o, 2);
    }
  }
}

}  // namespace jax_ub::JAX_UB_KERNELS
