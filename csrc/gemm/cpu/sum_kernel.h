// Adds several matrices. Used at the end of a GEMM, to add the addends, and for the
// reduction of partial results.
#pragma once

#include <string.h>

#include "gemm/cpu/kernels.h"
#include "gemm/cpu/simd_dtypes.h"

namespace jax_ub::JAX_UB_KERNELS {

// Adds the summands in kVectors vectors of one row, from `column` on. Tests the dtype
// of each summand only once.
template <DType kOut, int kVectors>
inline void SumVectors(
    const Summand* summands, int num_summands, int64_t row, int64_t column, char* out) {
  Vec sum[kVectors] = {};
  for (int i = 0; i < num_summands; ++i) {
    const DType dtype = summands[i].dtype;
    const int64_t bytes = BytesOf(dtype);
    const char* from = static_cast<const char*>(summands[i].data) +
                       row * summands[i].row_stride + column * bytes;
#pragma GCC unroll 8
    for (int v = 0; v < kVectors; ++v) {
      const Vec x = LoadAny(from + v * kLanes * bytes, dtype);
      sum[v] = i == 0 ? x : Add(sum[v], x);
    }
  }
#pragma GCC unroll 8
  for (int v = 0; v < kVectors; ++v) {
    StoreAs<kOut>(out + (column + v * kLanes) * kElementBytes<kOut>, sum[v]);
  }
}

// Adds the summands in the last `count` columns of a row, which do not fill a vector.
// Uses copies that are padded to a vector.
template <DType kOut>
inline void SumRest(const Summand* summands,
                    int num_summands,
                    int64_t row,
                    int64_t column,
                    int64_t count,
                    char* out) {
  Vec sum = Zero();
  for (int i = 0; i < num_summands; ++i) {
    const int64_t bytes = BytesOf(summands[i].dtype);
    char padded[4 * kLanes] = {};
    memcpy(padded,
           static_cast<const char*>(summands[i].data) + row * summands[i].row_stride +
               column * bytes,
           count * bytes);
    const Vec x = LoadAny(padded, summands[i].dtype);
    sum = i == 0 ? x : Add(sum, x);
  }
  constexpr int64_t kOutBytes = kElementBytes<kOut>;
  char padded[4 * kLanes];
  StoreAs<kOut>(padded, sum);
  memcpy(out + column * kOutBytes, padded, count * kOutBytes);
}

template <DType kOut>
void SumAs(const Summand* summands,
           int num_summands,
           int64_t rows,
           int64_t columns,
           void* out,
           int64_t out_stride) {
  constexpr int kVectors = 32 / kLanes;
  for (int64_t row = 0; row < rows; ++row) {
    char* out_row = static_cast<char*>(out) + row * out_stride;
    int64_t c = 0;
    for (; c + kVectors * kLanes <= columns; c += kVectors * kLanes) {
      SumVectors<kOut, kVectors>(summands, num_summands, row, c, out_row);
    }
    for (; c + kLanes <= columns; c += kLanes) {
      SumVectors<kOut, 1>(summands, num_summands, row, c, out_row);
    }
    if (c < columns) {
      SumRest<kOut>(summands, num_summands, row, c, columns - c, out_row);
    }
  }
}

inline void Sum(const Summand* summands,
                int num_summands,
                int64_t rows,
                int64_t columns,
                void* out,
                int64_t out_stride,
                DType out_dtype) {
  ForEachDType([&]<DType kDType>() {
    if constexpr (InfoOf(kDType).is_result) {
      if (kDType != out_dtype) return;
      SumAs<kDType>(summands, num_summands, rows, columns, out, out_stride);
    }
  });
}

}  // namespace jax_ub::JAX_UB_KERNELS
