// The AMX micro-kernel: computes one tile of C, 16 x 32 or 32 x 32 elements, over a
// block of K. The sums stay in tile registers. This header must be included after
// simd_avx512.h and simd_bf16_pairs.h, whose functions it uses.
//
// A tile register holds 16 rows of 64 bytes. Four registers hold sums of 16 x 16
// elements each. Each step of 16 words of K loads two registers of A and two of B. A
// needs no packing. A panel of B holds a row of 32 words for each word of K, which is
// the layout that TDPBF16PS requires. TDPBF16PS flushes subnormal numbers regardless of
// MXCSR.
#pragma once

#include <string.h>

#ifdef JAX_UB_EMULATE_AVX512
#include "emulated_amx.h"
#endif

#include "gemm/cpu/kernels.h"
#include "gemm/cpu/pack_kernel.h"
#include "gemm/cpu/simd_dtypes.h"
#include "gemm/cpu/sum_kernel.h"
#include "gemm/cpu/tile_kernel.h"

namespace jax_ub::JAX_UB_KERNELS {

inline constexpr int kAmxRows = 16;     // rows of a register
inline constexpr int kAmxWords = 16;    // words of K in a step; columns of a register
inline constexpr int kAmxColumns = 32;  // columns of a tile
// Size in bytes of a row of kAmxColumns sums. A row of a panel of B has the same size,
// because a word has 4 bytes, too.
inline constexpr int64_t kAmxRowBytes = 4 * kAmxColumns;

struct alignas(64) AmxConfiguration {
  uint8_t palette = 1;
  uint8_t start_row = 0;
  uint8_t reserved[14] = {};
  uint16_t row_bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
  uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
};

inline void ConfigureTiles() {
  static constexpr AmxConfiguration kWhole;
  _tile_loadconfig(&kWhole);
}

inline void ReleaseTiles() { _tile_release(); }

// A compiler barrier between AMX intrinsics and other loads and stores. It is necessary
// because GCC's intrinsics do not declare that they access memory.
inline void OrderMemory() { asm volatile("" : : : "memory"); }

// Loads the sums of a tile. Each tile register holds 16 x 16 sums: register 0 the upper
// left block, register 1 the upper right block and, if kIsTall, registers 2 and 3 the
// lower left and the lower right block.
template <bool kIsTall>
inline void LoadSums(const void* from) {
  const char* sums = static_cast<const char*>(from);
  _tile_loadd(0, sums, kAmxRowBytes);
  _tile_loadd(1, sums + 64, kAmxRowBytes);
  if constexpr (kIsTall) {
    _tile_loadd(2, sums + kAmxRows * kAmxRowBytes, kAmxRowBytes);
    _tile_loadd(3, sums + kAmxRows * kAmxRowBytes + 64, kAmxRowBytes);
  }
}

template <bool kIsTall>
inline void ClearSums() {
  _tile_zero(0);
  _tile_zero(1);
  if constexpr (kIsTall) {
    _tile_zero(2);
    _tile_zero(3);
  }
}

template <bool kIsTall>
inline void StoreSums(void* to, int64_t stride) {
  char* sums = static_cast<char*>(to);
  _tile_stored(0, sums, stride);
  _tile_stored(1, sums + 64, stride);
  if constexpr (kIsTall) {
    _tile_stored(2, sums + kAmxRows * stride, stride);
    _tile_stored(3, sums + kAmxRows * stride + 64, stride);
  }
  OrderMemory();
}

template <bool kIsTall>
inline void MultiplyStep(const char* a, int64_t a_stride, const char* b) {
  _tile_loadd(6, b, kAmxRowBytes);
  _tile_loadd(4, a, a_stride);
  _tile_dpbf16ps(0, 4, 6);
  _tile_loadd(7, b + 64, kAmxRowBytes);
  _tile_dpbf16ps(1, 4, 7);
  if constexpr (kIsTall) {
    _tile_loadd(5, a + kAmxRows * a_stride, a_stride);
    _tile_dpbf16ps(2, 5, 6);
    _tile_dpbf16ps(3, 5, 7);
  }
}

// Multiplies the last `num_words` words of K, which are fewer than a step has. A and B
// are copied and padded with zeros.
template <bool kIsTall>
inline void MultiplyRest(const char* a,
                         int64_t a_stride,
                         const char* b,
                         int64_t num_words) {
  constexpr int kRows = kIsTall ? 2 * kAmxRows : kAmxRows;
  alignas(64) char a_words[kRows * 4 * kAmxWords] = {};
  alignas(64) char b_words[kAmxWords * kAmxRowBytes] = {};
  for (int r = 0; r < kRows; ++r) {
    memcpy(a_words + r * 4 * kAmxWords, a + r * a_stride, 4 * num_words);
  }
  memcpy(b_words, b, num_words * kAmxRowBytes);
  OrderMemory();
  MultiplyStep<kIsTall>(a_words, 4 * kAmxWords, b_words);
}

inline void ScaleSums(char* sums, int64_t size, float factor) {
  const Vec factors = Broadcast(&factor);
  for (int64_t at = 0; at < size; at += 4 * kLanes) {
    Store(sums + at, Multiply(Load(sums + at), factors));
  }
}

// Multiplies the sums by the factor, adds the addend, rounds the sums to the dtype of
// the result, and stores them. The sums are first copied from the tile registers to a
// buffer, because AMX has no instructions for these operations.
template <bool kIsTall>
inline void StoreRounded(const TileOutput& output) {
  constexpr int kRows = kIsTall ? 2 * kAmxRows : kAmxRows;
  alignas(64) char sums[kRows * kAmxRowBytes];
  StoreSums<kIsTall>(sums, kAmxRowBytes);
  if (output.factor != 1) ScaleSums(sums, sizeof(sums), output.factor);
  const Summand summands[] = {{sums, kAmxRowBytes, DType::kF32},
                              {output.after, output.after_stride, output.after_dtype}};
  Sum(summands, output.after != nullptr ? 2 : 1, kRows, kAmxColumns, output.to,
      output.to_stride, output.to_dtype);
}

template <bool kIsTall>
void AmxTile(const void* a,
             int64_t a_stride,
             const BPanel& b,
             int64_t num_words,
             const TileOutput& output,
             PrefetchCursor& prefetch) {
  constexpr int kStepsOfLines = kAmxWords / kStepWords;
  OrderMemory();
  if (output.before != nullptr) {
    LoadSums<kIsTall>(output.before);
  } else {
    ClearSums<kIsTall>();
  }
  const char* a_words = static_cast<const char*>(a);
  const char* b_words = static_cast<const char*>(b.words);
  const int64_t rest = num_words % kAmxWords;
  PrefetchCursor lines =
      prefetch;  // a copy, so that the compiler keeps it in registers
  int64_t k = 0;
  for (; k < num_words - rest; k += kAmxWords) {
    for (int i = 0; i < kStepsOfLines; ++i) FetchStep(lines);
    MultiplyStep<kIsTall>(a_words + 4 * k, a_stride, b_words + k * kAmxRowBytes);
  }
  if (rest > 0) {
    MultiplyRest<kIsTall>(a_words + 4 * k, a_stride, b_words + k * kAmxRowBytes, rest);
  }
  prefetch = lines;
  if (output.to_dtype == DType::kF32 && output.after == nullptr && output.factor == 1) {
    StoreSums<kIsTall>(output.to, output.to_stride);
  } else {
    StoreRounded<kIsTall>(output);
  }
}

// Packs A into panels of width 1: word k of row o goes to rows + o * row_bytes + 4 * k.
// The source is contiguous along K, and its rows are `stride` bytes apart.
template <DType kDType>
void CopyRows(const void* source,
              int64_t stride,
              int64_t outer,
              int64_t num_words,
              void* rows,
              int64_t row_bytes) {
  for (int64_t o = 0; o < outer; ++o) {
    ConvertToBF16<kDType>(static_cast<const char*>(source) + o * stride, 2 * num_words,
                          static_cast<char*>(rows) + o * row_bytes);
  }
}

// Packs A into the same layout as CopyRows does, from a source that is contiguous along
// M. Elements that are neighbors along K are `stride` bytes apart.
template <DType kDType>
void TransposeToRows(const void* source,
                     int64_t stride,
                     int64_t outer,
                     int64_t num_words,
                     void* rows,
                     int64_t row_bytes) {
  const char* from = static_cast<const char*>(source);
  char* to = static_cast<char*>(rows);
  const auto pair_at = [=](int64_t k, int64_t o) {
    return from + k * Pairs<kDType>::kRows * stride + o * Pairs<kDType>::kBytes;
  };
  if (outer < kLanes || num_words < kLanes) {
    for (int64_t k = 0; k < num_words; ++k) {
      for (int64_t o = 0; o < outer; ++o) {
        Pairs<kDType>::CopyWord(pair_at(k, o), stride, to + o * row_bytes + 4 * k);
      }
    }
    return;
  }
  const auto load = [=](int64_t k, int64_t o) {
    return Pairs<kDType>::LoadWords(pair_at(k, o), stride);
  };
  TransposeBlocks<1>(num_words, outer, load, kStoreWords, to, row_bytes);
}

}  // namespace jax_ub::JAX_UB_KERNELS
