// Parameters of the kernels that sum, copy and transpose. The kernels, their launcher
// and their host emulation (tests/csrc/cuda/emulated_kernels.h) share them. Addresses
// are CUdeviceptr values.
#pragma once

#include <cstdint>

#include "gemm/dtype.h"

namespace jax_ub {

// Maximum number of addends: the partial sums of 16 ranks, a bias, a residual, an
// accumulator, and one spare.
inline constexpr int kMaxParts = 20;

// A matrix whose rows are contiguous: an addend or the result of a sum.
struct SumPart {
  uint64_t data;
  int64_t row_stride;  // in elements; 0 repeats one row (not allowed for the result)
  DType dtype;
};

// Parameters of the kernel jax_ub_sum, which computes
//
//   out[r, c] = round(((parts[0][r, c] + parts[1][r, c]) + parts[2][r, c]) ...)
//
// It adds in f32, and rounds to nearest even. `out` may be the memory of one of the
// parts.
struct SumParams {
  uint32_t num_parts;
  uint32_t is_aligned;  // 1: all addresses and strides are multiples of 16 bytes
  int64_t rows;
  int64_t columns;
  SumPart out;
  SumPart parts[kMaxParts];
};

// Maximum number of arrays that kernels add to their sums over the ranks.
inline constexpr int kMaxSumAddends = 2;  // bias and residual

// An array in the memory of this device that a kernel adds to its sum over the ranks,
// such as a bias. Its element i % period is added to element i of the sum.
struct SumAddend {
  uint64_t data;
  int64_t period;
  DType dtype;
};

// Parameters of the kernel jax_ub_copy, which copies contiguous rows to this device or
// a peer. It uses multiprocessors (SMs) instead of a copy engine. Strides are in bytes.
struct CopyParams {
  uint64_t from;
  uint64_t to;
  int64_t num_rows;
  int64_t row_bytes;
  int64_t from_stride;
  int64_t to_stride;
  uint32_t unit_bytes;  // 16, 8, 4, 2 or 1; divides all addresses, sizes and strides
};

// Parameters of the kernel jax_ub_transpose, which transposes a matrix of bytes: byte
// (r, c) of `from` becomes byte (c, r) of `to`. kTransposedTile divides all members.
// Strides are in bytes.
struct TransposeParams {
  uint64_t from;
  uint64_t to;
  int64_t rows;  // of `from`
  int64_t columns;
  int64_t from_stride;
  int64_t to_stride;
};

// Number of rows and columns of a tile, which one thread transposes in registers.
inline constexpr int kTransposedTile = 16;
// Number of tiles that a warp transposes, along the rows and along the columns. With
// these numbers, the warp reads and writes whole sectors of 32 bytes.
inline constexpr int kPatchRows = 4;
inline constexpr int kPatchColumns = 8;

inline constexpr char kSumKernel[] = "jax_ub_sum";
inline constexpr char kCopyKernel[] = "jax_ub_copy";
inline constexpr char kTransposeKernel[] = "jax_ub_transpose";
// Number of threads per block, for each kernel.
inline constexpr int kSumThreads = 128;
inline constexpr int kCopyThreads = 512;
inline constexpr int kTransposeThreads = 128;

}  // namespace jax_ub
