// Computes products with few rows of A. The memory bandwidth of reading B limits them,
// so B is read once, in place, without packing.
//
//   sums[m, c] += sum_k A[m, k] * B[k, c],   m < kRows <= kMaxSmallM, c < columns
//
// A is f32, with element (m, k) at a + m * a_stride + 4 * k. Element (m, c) of sums is
// at sums + m * sums_stride + 4 * c. All strides are in bytes.
#pragma once

#include <string.h>

#include "gemm/cpu/kernels.h"
#include "gemm/cpu/pack_kernel.h"

namespace jax_ub::JAX_UB_KERNELS {

// Loads the first `count` elements at `p` as f32, and sets the other lanes to zero.
template <DType kDType>
inline Vec LoadFirst(const char* p, int64_t count) {
  char padded[4 * kLanes] = {};
  memcpy(padded, p, count * kElementBytes<kDType>);
  return LoadAs<kDType>(padded);
}

// Prefetches the vector of kLanes elements at byte `offset` of a row. Does nothing if
// an earlier vector of the row is in the same cache line.
template <DType kDType>
inline void PrefetchVector(const char* row, int64_t offset) {
  if (offset % kLineBytes < kLanes * kElementBytes<kDType>) Prefetch(row + offset);
}

// Adds the products of A and kStep rows of B to the sums, for all columns. Each sum is
// loaded and stored once per kStep words of K. Prefetches the kStep rows at `next`,
// because the rows of a block are too short for the processor to prefetch them by
// itself.
template <int kRows, int kStep, DType kDType>
inline void AddStep(const char* a,
                    int64_t a_stride,
                    const char* b,
                    const char* next,
                    int64_t b_stride,
                    int64_t columns,
                    char* sums,
                    int64_t sums_stride) {
  Vec factors[kStep][kRows];
#pragma GCC unroll 8
  for (int s = 0; s < kStep; ++s) {
#pragma GCC unroll 8
    for (int m = 0; m < kRows; ++m) {
      factors[s][m] = Broadcast(a + m * a_stride + 4 * s);
    }
  }
  int64_t c = 0;
  for (; c + kLanes <= columns; c += kLanes) {
    Vec sum[kRows];
#pragma GCC unroll 8
    for (int m = 0; m < kRows; ++m) sum[m] = Load(sums + m * sums_stride + 4 * c);
#pragma GCC unroll 8
    for (int s = 0; s < kStep; ++s) {
      const int64_t offset = c * kElementBytes<kDType>;
      PrefetchVector<kDType>(next + s * b_stride, offset);
      const Vec x = LoadAs<kDType>(b + s * b_stride + offset);
#pragma GCC unroll 8
      for (int m = 0; m < kRows; ++m) sum[m] = MultiplyAdd(factors[s][m], x, sum[m]);
    }
#pragma GCC unroll 8
    for (int m = 0; m < kRows; ++m) Store(sums + m * sums_stride + 4 * c, sum[m]);
  }
  const int64_t rest = columns - c;
  if (rest == 0) return;
  for (int m = 0; m < kRows; ++m) {
    char* out = sums + m * sums_stride + 4 * c;
    Vec sum = LoadFirst<DType::kF32>(out, rest);
    for (int s = 0; s < kStep; ++s) {
      const char* from = b + s * b_stride + c * kElementBytes<kDType>;
      const Vec factor = Broadcast(a + m * a_stride + 4 * s);
      sum = MultiplyAdd(factor, LoadFirst<kDType>(from, rest), sum);
    }
    float padded[kLanes];
    Store(padded, sum);
    memcpy(out, padded, rest * 4);
  }
}

// Adds the product of A and a block of columns of B to the sums. The rows of B are
// contiguous, and `b_stride` bytes apart.
template <int kRows, DType kDType>
void MultiplyColumnBlock(const void* a,
                         int64_t a_stride,
                         const void* b,
                         int64_t b_stride,
                         int64_t num_words,
                         int64_t columns,
                         void* sums,
                         int64_t sums_stride) {
  // Maximum number of elements of A, kRows x kStep, that a step keeps in vector
  // registers. AVX512 has 32 registers and AVX2 has 16. The other registers are for
  // sums and elements of B.
  constexpr int kFactors = kLanes >= 16 ? 16 : 8;
  constexpr int kStep = kRows * 8 <= kFactors ? 8 : kFactors / kRows;
  constexpr int64_t kRowsAhead = 16;
  const char* a_word = static_cast<const char*>(a);
  const char* row = static_cast<const char*>(b);
  char* out = static_cast<char*>(sums);
  int64_t k = 0;
  for (; k + kStep <= num_words; k += kStep, row += kStep * b_stride) {
    const bool is_near_end = k + kRowsAhead + kStep > num_words;
    const char* next = is_near_end ? row : row + kRowsAhead * b_stride;
    AddStep<kRows, kStep, kDType>(a_word + 4 * k, a_stride, row, next, b_stride,
                                  columns, out, sums_stride);
  }
  for (; k < num_words; ++k, row += b_stride) {
    AddStep<kRows, 1, kDType>(a_word + 4 * k, a_stride, row, row, b_stride, columns,
                              out, sums_stride);
  }
}

inline float SumOfLanes(Vec v) {
  float lanes[kLanes];
  Store(lanes, v);
  for (int width = kLanes / 2; width > 0; width /= 2) {
    for (int i = 0; i < width; ++i) lanes[i] += lanes[i + width];
  }
  return lanes[0];
}

// Adds the dot products of every row of A with kColumns columns of B to the sums. Lane
// i adds the products of k = i, i + kLanes, ... Prefetches the kColumns columns at
// `next`.
template <int kRows, int kColumns, DType kDType>
inline void AddDots(const char* a,
                    int64_t a_stride,
                    const char* b,
                    const char* next,
                    int64_t b_stride,
                    int64_t num_words,
                    char* sums,
                    int64_t sums_stride) {
  Vec sum[kRows][kColumns];
#pragma GCC unroll 8
  for (int m = 0; m < kRows; ++m) {
#pragma GCC unroll 8
    for (int c = 0; c < kColumns; ++c) sum[m][c] = Zero();
  }
  int64_t k = 0;
  for (; k + kLanes <= num_words; k += kLanes) {
    Vec x[kColumns];
#pragma GCC unroll 8
    for (int c = 0; c < kColumns; ++c) {
      PrefetchVector<kDType>(next + c * b_stride, k * kElementBytes<kDType>);
      x[c] = LoadAs<kDType>(b + c * b_stride + k * kElementBytes<kDType>);
    }
#pragma GCC unroll 8
    for (int m = 0; m < kRows; ++m) {
      const Vec factors = Load(a + m * a_stride + 4 * k);
#pragma GCC unroll 8
      for (int c = 0; c < kColumns; ++c)
        sum[m][c] = MultiplyAdd(factors, x[c], sum[m][c]);
    }
  }
  const int64_t rest = num_words - k;
  for (int m = 0; m < kRows; ++m) {
    const Vec factors = LoadFirst<DType::kF32>(a + m * a_stride + 4 * k, rest);
    for (int c = 0; c < kColumns; ++c) {
      const char* from = b + c * b_stride + k * kElementBytes<kDType>;
      const Vec total = MultiplyAdd(factors, LoadFirst<kDType>(from, rest), sum[m][c]);
      float out;
      memcpy(&out, sums + m * sums_stride + 4 * c, 4);
      out += SumOfLanes(total);
      memcpy(sums + m * sums_stride + 4 * c, &out, 4);
    }
  }
}

// Adds the product of A and B to the sums, by dot products. The columns of B are
// contiguous (along K), and `b_stride` bytes apart.
template <int kRows, DType kDType>
void MultiplyDots(const void* a,
                  int64_t a_stride,
                  const void* b,
                  int64_t b_stride,
                  int64_t num_words,
                  int64_t columns,
                  void* sums,
                  int64_t sums_stride) {
  constexpr int kColumns = kRows <= 2 ? 4 : 2;
  const char* a_row = static_cast<const char*>(a);
  const char* column = static_cast<const char*>(b);
  char* out = static_cast<char*>(sums);
  int64_t c = 0;
  for (; c + kColumns <= columns; c += kColumns, column += kColumns * b_stride) {
    const bool is_near_end = c + 2 * kColumns > columns;
    const char* next = is_near_end ? column : column + kColumns * b_stride;
    AddDots<kRows, kColumns, kDType>(a_row, a_stride, column, next, b_stride, num_words,
                                     out + 4 * c, sums_stride);
  }
  for (; c < columns; ++c, column += b_stride) {
    AddDots<kRows, 1, kDType>(a_row, a_stride, column, column, b_stride, num_words,
                              out + 4 * c, sums_stride);
  }
}

}  // namespace jax_ub::JAX_UB_KERNELS
