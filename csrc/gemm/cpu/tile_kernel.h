// The micro-kernel: computes one tile of C over a block of K and keeps its sums in
// registers.
//
//   sum[r, c] = sum_k A[r, k] * B[k, c],   r < kRows, c < kVectors * kLanes
//
// For each k it loads kVectors vectors of B and broadcasts kRows words of A. In a full
// tile (6 x 16 with AVX2, 6 x 64 with AVX512), the kRows * kVectors sums, the vectors
// of B and one broadcast word exactly fit the registers. Sums are added in the order k
// = 0, 1, 2, ...
#pragma once

#include "gemm/cpu/kernels.h"
#include "gemm/cpu/simd_dtypes.h"

namespace jax_ub::JAX_UB_KERNELS {

template <DType kTo, int kRows, int kVectors>
inline void StoreRows(const Vec (&sum)[kRows][kVectors], const TileOutput& output) {
  char* row = static_cast<char*>(output.to);
#pragma GCC unroll 16
  for (int r = 0; r < kRows; ++r, row += output.to_stride) {
#pragma GCC unroll 16
    for (int v = 0; v < kVectors; ++v) {
      StoreAs<kTo>(row + v * kLanes * kElementBytes<kTo>, sum[r][v]);
    }
  }
}

// Calls StoreRows for the dtype of the result. Does not use ForEachDType: if a
// lambda captures `sum`, gcc 12 keeps the sums in memory instead of registers.
template <int kIndex = 0, int kRows, int kVectors>
inline void StoreRowsAsAny(Vec (&sum)[kRows][kVectors], const TileOutput& output) {
  constexpr DType kDType = kDTypes[kIndex].dtype;
  if constexpr (kDTypes[kIndex].is_result) {
    if (output.to_dtype == kDType) return StoreRows<kDType>(sum, output);
  }
  if constexpr (kIndex + 1 < kNumDTypes) StoreRowsAsAny<kIndex + 1>(sum, output);
}

template <int kRows, int kVectors>
inline void ScaleTile(Vec (&sum)[kRows][kVectors], float factor) {
  const Vec factors = Broadcast(&factor);
#pragma GCC unroll 16
  for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 16
    for (int v = 0; v < kVectors; ++v) sum[r][v] = Multiply(sum[r][v], factors);
  }
}

template <int kRows, int kVectors>
inline void StoreTile(Vec (&sum)[kRows][kVectors], const TileOutput& output) {
  if (output.before != nullptr) {
#pragma GCC unroll 16
    for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 16
      for (int v = 0; v < kVectors; ++v) {
        sum[r][v] = Add(Load(output.before + (r * kVectors + v) * kLanes), sum[r][v]);
      }
    }
  }
  if (output.factor != 1) ScaleTile(sum, output.factor);
  if (output.after != nullptr) {
    const char* row = static_cast<const char*>(output.after);
    const int64_t vector_bytes = kLanes * BytesOf(output.after_dtype);
#pragma GCC unroll 16
    for (int r = 0; r < kRows; ++r, row += output.after_stride) {
#pragma GCC unroll 16
      for (int v = 0; v < kVectors; ++v) {
        sum[r][v] = Add(sum[r][v], LoadAny(row + v * vector_bytes, output.after_dtype));
      }
    }
  }
  StoreRowsAsAny(sum, output);
}

// Prefetches the cache lines of one step of a tile (kStepWords words of K), and moves
// the cursor past them.
inline void FetchStep(PrefetchCursor& prefetch) {
  for (int64_t i = 0; i < prefetch.lines_per_step && prefetch.num_rows > 0; ++i) {
    Prefetch(prefetch.row + prefetch.at);
    prefetch.at += kLineBytes;
    if (prefetch.at >= prefetch.row_bytes) {
      prefetch.at = 0;
      prefetch.row += prefetch.stride;
      --prefetch.num_rows;
    }
  }
}

// Template argument `Words` of Tile for a panel of B that is already packed. With
// Widened or Pairs, the tile packs the panel while it multiplies.
struct Packed {};

template <typename Words>
inline constexpr bool kPacks = true;
template <>
inline constexpr bool kPacks<Packed> = false;

// Computes a tile of kRows rows and kVectors * kLanes columns (a TileFunction).
// `multiply_add` is MultiplyAdd or, for pairs of bf16, MultiplyAddPairs.
template <typename Words,
          int kRows,
          int kVectors,
          bool kColumnsOfA,
          Vec (*multiply_add)(Vec, Vec, Vec)>
void Tile(const void* a,
          int64_t a_stride,
          const BPanel& b,
          int64_t num_words,
          const TileOutput& output,
          PrefetchCursor& prefetch) {
  Vec sum[kRows][kVectors];
#pragma GCC unroll 16
  for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 16
    for (int v = 0; v < kVectors; ++v) sum[r][v] = Zero();
  }
  if (output.before != nullptr) {
    // Prefetches the sums of earlier blocks of K, which have left the L1 cache. They
    // are needed after the loop.
    for (int i = 0; i < kRows * kVectors * kLanes; i += 16) Prefetch(output.before + i);
  }
  const char* a_word[kColumnsOfA ? 1 : kRows];
  a_word[0] = static_cast<const char*>(a);
  if constexpr (!kColumnsOfA) {
#pragma GCC unroll 16
    for (int r = 1; r < kRows; ++r) a_word[r] = a_word[r - 1] + a_stride;
  }
  char* b_word = static_cast<char*>(b.words);
  const char* source = static_cast<const char*>(b.source);
  const int64_t source_stride = b.source_stride;
  PrefetchCursor lines =
      prefetch;  // a copy, so that the compiler keeps it in registers
  for (int64_t step = 0; step < num_words; step += kStepWords) {
    FetchStep(lines);
    const int64_t end = step + kStepWords < num_words ? step + kStepWords : num_words;
    for (int64_t k = step; k < end; ++k) {
      Vec b_vector[kVectors];
      if constexpr (kPacks<Words>) Words::LoadRow(source, source_stride, b_vector);
#pragma GCC unroll 16
      for (int v = 0; v < kVectors; ++v) {
        char* word = b_word + v * sizeof(Vec);
        if constexpr (kPacks<Words>) {
          Store(word, b_vector[v]);
        } else {
          b_vector[v] = Load(word);
        }
      }
#pragma GCC unroll 16
      for (int r = 0; r < kRows; ++r) {
        const Vec a_vector = Broadcast(
            kColumnsOfA ? a_word[0] + 4 * r : a_word[kColumnsOfA ? 0 : r] + 4 * k);
#pragma GCC unroll 16
        for (int v = 0; v < kVectors; ++v) {
          sum[r][v] = multiply_add(a_vector, b_vector[v], sum[r][v]);
        }
      }
      b_word += kVectors * sizeof(Vec);
      if constexpr (kPacks<Words>) source += Words::kRows * source_stride;
      if constexpr (kColumnsOfA) a_word[0] += a_stride;
    }
  }
  prefetch = lines;
  StoreTile(sum, output);
}

}  // namespace jax_ub::JAX_UB_KERNELS
