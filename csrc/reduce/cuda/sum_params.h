// What the kernels that sum and copy are given: read by the kernels, their launcher and
// their host twins (tests/csrc/cuda/emulated_kernels.h). Addresses are CUdeviceptr.
#pragma once

#include <cstdint>

#include "gemm/dtype.h"

namespace jax_ub {

// Parts of 16 ranks, bias, residual, accumulator and one to spare.
inline constexpr int kMaxParts = 20;

// Rows of contiguous columns.
struct SumPart {
  uint64_t data;
  int64_t row_stride;  // in elements; 0 repeats one row (not of the result)
  DType dtype;
};

// jax_ub_sum: out[r, c] = round(((parts[0][r, c] + parts[1][r, c]) + parts[2][r, c]) ...)
// in f32, rounded once to nearest even. `out` may be the memory of a part, exactly.
struct SumParams {
  uint32_t num_parts;
  uint32_t is_aligned;  // addresses and strides are multiples of 16 bytes
  int64_t rows;
  int64_t columns;
  SumPart out;
  SumPart parts[kMaxParts];
};

// jax_ub_copy: rows of contiguous bytes, by SMs instead of a copy engine. Strides are in
// bytes. Also to a peer's memory.
struct CopyParams {
  uint64_t from;
  uint64_t to;
  int64_t num_rows;
  int64_t row_bytes;
  int64_t from_stride;
  int64_t to_stride;
  uint32_t unit_bytes;  // 16, 8, 4, 2 or 1, of which all of these are multiples
};

inline constexpr char kSumKernel[] = "jax_ub_sum";
inline constexpr char kCopyKernel[] = "jax_ub_copy";
// Per block.
inline constexpr int kSumThreads = 128;
inline constexpr int kCopyThreads = 512;

}  // namespace jax_ub
