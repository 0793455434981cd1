// Packs and multiplies words that are pairs of bf16, with AVX512_BF16. This header must
// be included after simd_avx512.h and kernel_set.h. Elements of FP8 are converted to
// bf16, which is exact.
//
// vdpbf16ps adds two products per lane: sum + x[2i] y[2i] + x[2i + 1] y[2i + 1]. It
// treats subnormal operands as zero and flushes subnormal results to zero.
#pragma once

#include "gemm/cpu/fp8.h"
#include "gemm/cpu/kernels.h"
#include "gemm/cpu/simd_fp8_vbmi.h"

namespace jax_ub::JAX_UB_KERNELS {

inline Vec MultiplyAddPairs(Vec a, Vec b, Vec sum) {
  return _mm512_dpbf16_ps(sum, __builtin_bit_cast(__m512bh, a),
                          __builtin_bit_cast(__m512bh, b));
}

// Converts one FP8 element to bf16, or copies one bf16 element.
template <DType kDType>
inline void CopyElement(const char* from, char* to) {
  if constexpr (IsFp8(kDType)) {
    memcpy(to, &kFp8Table<kDType>.bf16[static_cast<uint8_t>(*from)], 2);
  } else {
    static_assert(kDType == DType::kBF16);
    memcpy(to, from, 2);
  }
}

// The order of bytes with which PairsOfFp8 converts two rows of 32 FP8 numbers, each in
// the lower half of a vector, to pairs of bf16. A pair has both numbers of a column.
// Columns 0 to 15 are in the first result vector, and columns 16 to 31 in the second.
inline constexpr ByteOrder kOrderOfTwoRows = OrderOfBytes(1, 64, 16);

// Packs two bf16 into each 32-bit word: an element of row 2k in the lower half, and an
// element of row 2k + 1 in the upper half. It is a template argument of PackCopied and
// of packing tiles. The members have the same meaning as in Widened (pack_kernel.h).
template <DType kDType>
struct Pairs {
  static constexpr int64_t kBytes = kElementBytes<kDType>;
  static constexpr int64_t kRows = 2;

  static Vec LoadWords(const char* row, int64_t stride) {
    const __m512i low = LoadElements(row);
    const __m512i high = _mm512_slli_epi32(LoadElements(row + stride), 16);
    const __m512i pairs = _mm512_or_si512(low, high);
    if constexpr (IsFp8(kDType)) {
      return _mm512_castsi512_ps(BF16OfFp8Lanes<kDType>(pairs));
    } else {
      return _mm512_castsi512_ps(pairs);
    }
  }

  template <int kVectors>
  static void LoadRow(const char* row, int64_t stride, Vec (&words)[kVectors]) {
    constexpr int kPairedVectors = IsFp8(kDType) ? kVectors / 2 * 2 : 0;
#pragma GCC unroll 16
    for (int v = 0; v < kPairedVectors; v += 2) {
      const char* from = row + v * kLanes * kBytes;
      const __m512i codes =
          _mm512_permutex2var_epi8(_mm512_castsi256_si512(LoadHalves(from)),
                                   _mm512_loadu_si512(kOrderOfTwoRows.from),
                                   _mm512_castsi256_si512(LoadHalves(from + stride)));
      PairsOfFp8<kDType>(codes, words[v], words[v + 1]);
    }
#pragma GCC unroll 16
    for (int v = kPairedVectors; v < kVectors; ++v) {
      words[v] = LoadWords(row + v * kLanes * kBytes, stride);
    }
  }

  static void CopyWord(const char* row, int64_t stride, char* word) {
    CopyElement<kDType>(row, word);
    CopyElement<kDType>(row + stride, word + 2);
  }

 private:
  static __m512i LoadElements(const char* row) {
    if constexpr (IsFp8(kDType)) {
      return LoadBytesAsWords(row);
    } else {
      return _mm512_cvtepu16_epi32(LoadHalves(row));
    }
  }
};

// Template argument of PackTransposed that makes words of two bf16. A word has two
// neighboring elements of a row.
template <DType kDType>
struct AdjacentPairs {
  static constexpr int64_t kBytes = 2 * kElementBytes<kDType>;
  // A 32-bit lane is transposed as a whole. It has four FP8 numbers, which become two
  // words afterwards, or two bf16, which are one word.
  static constexpr int64_t kWordsPerLane = IsFp8(kDType) ? 2 : 1;

  static void StoreLanes(Vec lanes, char* to, int64_t stride) {
    Vec first, second;
    PairsOfFp8<kDType>(Permute(lanes, kOrderOfColumns), first, second);
    Store(to, first);
    Store(to + stride, second);
  }

  static Vec LoadWords(const char* row, int64_t) {
    if constexpr (IsFp8(kDType)) {
      return _mm512_castsi512_ps(
          BF16OfFp8Lanes<kDType>(_mm512_cvtepu8_epi16(LoadHalves(row))));
    } else {
      return Load(row);
    }
  }

  static void CopyWord(const char* row, int64_t, char* word) {
    CopyElement<kDType>(row, word);
    CopyElement<kDType>(row + kElementBytes<kDType>, word + 2);
  }
};

// Converts `count` consecutive elements to bf16. This is the WidenFunction of kernels
// whose words are pairs of bf16.
template <DType kDType>
void ConvertToBF16(const void* from, int64_t count, void* to) {
  const char* element = static_cast<const char*>(from);
  char* bf16 = static_cast<char*>(to);
  if constexpr (kDType == DType::kBF16) {
    memcpy(bf16, element, 2 * count);
    return;
  }
  int64_t i = 0;
  for (; i + 2 * kLanes <= count; i += 2 * kLanes) {
    Store(bf16 + 2 * i,
          AdjacentPairs<kDType>::LoadWords(element + i * kElementBytes<kDType>, 0));
  }
  for (; i < count; ++i) {
    CopyElement<kDType>(element + i * kElementBytes<kDType>, bf16 + 2 * i);
  }
}

inline Vec ScaleWords(Vec words, Vec low_factors, Vec high_factors) {
  const __m512i pairs = _mm512_castps_si512(words);
  const __m512i upper = _mm512_set1_epi32(static_cast<int>(0xffff0000));
  const Vec low = _mm512_castsi512_ps(_mm512_slli_epi32(pairs, 16));
  const Vec high = _mm512_castsi512_ps(_mm512_and_si512(pairs, upper));
  const __m512i low_product = _mm512_castps_si512(Multiply(low, low_factors));
  const __m512i high_product = _mm512_castps_si512(Multiply(high, high_factors));
  return _mm512_castsi512_ps(_mm512_or_si512(_mm512_srli_epi32(low_product, 16),
                                             _mm512_and_si512(high_product, upper)));
}

// Multiplies packed pairs of bf16 by FP8 scales. This is the ScaleFunction of kernels
// whose words are pairs of bf16.
inline void ScalePairs(void* words,
                       int64_t row_bytes,
                       int64_t num_rows,
                       int64_t num_words,
                       const float* low,
                       const float* high) {
  char* row = static_cast<char*>(words);
  for (int64_t r = 0; r < num_rows; ++r, row += row_bytes) {
    int64_t i = 0;
    for (; i + kLanes <= num_words; i += kLanes) {
      Store(row + 4 * i, ScaleWords(Load(row + 4 * i), Load(low + i), Load(high + i)));
    }
    if (i == num_words) continue;
    const int64_t size = 4 * (num_words - i);
    float padded[3][kLanes] = {};
    memcpy(padded[0], row + 4 * i, size);
    memcpy(padded[1], low + i, size);
    memcpy(padded[2], high + i, size);
    Store(padded[0], ScaleWords(Load(padded[0]), Load(padded[1]), Load(padded[2])));
    memcpy(row + 4 * i, padded[0], size);
  }
}

// Calls function.operator()<dtype>() for each dtype whose values bf16 represents
// exactly.
template <typename Function>
constexpr void ForEachPairDType(const Function& function) {
  ForEachDType([&]<DType kDType>() {
    if constexpr (InfoOf(kDType).exact_in_bf16) function.template operator()<kDType>();
  });
}

}  // namespace jax_ub::JAX_UB_KERNELS
