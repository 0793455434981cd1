// Converts 64 FP8 numbers at a time, with byte permutations of AVX512_VBMI. This header
// must be included after simd_avx512.h.
#pragma once

#include "gemm/cpu/fp8.h"
#include "gemm/cpu/pack_kernel.h"

namespace jax_ub::JAX_UB_KERNELS {

// Indices of a byte permutation: 0 to 63 are bytes of the first vector, 64 to 127 of the
// second.
struct ByteOrder {
  uint8_t from[64];
};

// Returns an order of bytes for PairsOfFp8, which converts 64 bytes to two vectors of
// 16 bf16 pairs. With this order, bf16 number `upper` (0 or 1) of pair `lane` in vector
// `second` (0 or 1) is converted from byte lane * lane_stride + upper * upper_stride +
// second * second_stride.
constexpr ByteOrder OrderOfBytes(int lane_stride, int upper_stride, int second_stride) {
  ByteOrder order = {};
  for (int i = 0; i < 64; ++i) {
    const int lane = i / 16 * 4 + i % 8 / 2;
    const int upper = i % 2;
    const int second = i % 16 / 8;
    order.from[i] = static_cast<uint8_t>(lane * lane_stride + upper * upper_stride +
                                         second * second_stride);
  }
  return order;
}

// The order of bytes for a vector of 16 columns that have four FP8 numbers along K
// each. With this order, PairsOfFp8 returns a bf16 pair for each column in both
// vectors: the first two numbers of the column in the first vector, and the last two in
// the second vector.
inline constexpr ByteOrder kOrderOfColumns = OrderOfBytes(4, 1, 2);

inline __m512i Permute(Vec bytes, const ByteOrder& order) {
  return _mm512_permutexvar_epi8(_mm512_loadu_si512(order.from),
                                 _mm512_castps_si512(bytes));
}

// Converts 64 FP8 numbers to 32 words (pairs of bf16). Of every 16 numbers, the first 8
// become four words of `first`, and the last 8 become four words of `second`.
template <DType kDType>
inline void PairsOfFp8(__m512i codes, Vec& first, Vec& second) {
  const Fp8Bytes& table = kFp8Bytes<kDType>;
  const __m512i magnitude = _mm512_permutex2var_epi8(
      _mm512_loadu_si512(table.upper), codes, _mm512_loadu_si512(table.upper + 64));
  const __m512i lower = _mm512_permutex2var_epi8(_mm512_loadu_si512(table.lower), codes,
                                                 _mm512_loadu_si512(table.lower + 64));
  constexpr int kMagnitudeOrSign = 0xf8;  // magnitude | (codes & sign bits)
  const __m512i upper = _mm512_ternarylogic_epi32(
      magnitude, codes, _mm512_set1_epi32(static_cast<int>(0x80808080)),
      kMagnitudeOrSign);
  first = _mm512_castsi512_ps(_mm512_unpacklo_epi8(lower, upper));
  second = _mm512_castsi512_ps(_mm512_unpackhi_epi8(lower, upper));
}

// Permutes 64 FP8 numbers by `order`, and converts them to f32. PairsOfFp8 first
// converts them to two vectors of bf16 pairs. words[0] and words[1] get the lower and
// the upper numbers of the pairs in the first vector, words[2] and words[3] those in
// the second vector.
template <DType kDType>
inline void WidenFp8(Vec bytes, const ByteOrder& order, Vec (&words)[4]) {
  Vec pairs[2];
  PairsOfFp8<kDType>(Permute(bytes, order), pairs[0], pairs[1]);
  const __m512i upper = _mm512_set1_epi32(static_cast<int>(0xffff0000));
#pragma GCC unroll 2
  for (int i = 0; i < 2; ++i) {
    const __m512i pair = _mm512_castps_si512(pairs[i]);
    words[2 * i] = _mm512_castsi512_ps(_mm512_slli_epi32(pair, 16));
    words[2 * i + 1] = _mm512_castsi512_ps(_mm512_and_si512(pair, upper));
  }
}

// Converts elements to f32 while they are packed, FP8 elements four vectors at a time.
// Template argument of PackCopied, PackTransposed and packing tiles.
template <DType kDType>
struct WidenedByBytes : Widened<kDType> {};

template <DType kDType>
  requires(IsFp8(kDType))
struct WidenedByBytes<kDType> : Widened<kDType> {
  static constexpr int64_t kWordsPerLane = 4;
  static constexpr ByteOrder kOrderOfRow = OrderOfBytes(1, kLanes, 2 * kLanes);

  template <int kVectors>
  static void LoadRow(const char* row, int64_t, Vec (&words)[kVectors]) {
    static_assert(kVectors == 4);
    WidenFp8<kDType>(Load(row), kOrderOfRow, words);
  }

  // Each lane has four neighboring FP8 elements of a row. Converts them to f32, and
  // stores element i of all lanes at to + i * stride.
  static void StoreLanes(Vec lanes, char* to, int64_t stride) {
    Vec words[4];
    WidenFp8<kDType>(lanes, kOrderOfColumns, words);
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) Store(to + i * stride, words[i]);
  }
};

}  // namespace jax_ub::JAX_UB_KERNELS
