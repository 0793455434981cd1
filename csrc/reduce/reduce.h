// Sums and copies matrices that are stored in the buffers of several ranks.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "gemm/dtype.h"

namespace jax_ub {

// A read-only addend. The columns of a row are contiguous.
struct ConstMatrix {
  const std::byte* data = nullptr;
  int64_t row_stride = 0;  // in elements; 0 repeats one row
  DType dtype = DType::kF32;
};

struct Matrix {
  std::byte* data = nullptr;
  int64_t row_stride = 0;  // in elements
  DType dtype = DType::kF32;
};

// out[r, c] = round(((chunks[0][r, c] + chunks[1][r, c]) + chunks[2][r, c]) + ...)
//
// Adds in f32, in the order of `chunks` (the order of the ranks), and rounds once, so
// every rank computes the same bits. `out` may be exactly the memory of one chunk.
// Throws std::invalid_argument if `chunks` is empty.
void SumChunks(std::span<const ConstMatrix> chunks,
               int64_t rows,
               int64_t columns,
               const Matrix& out);

// Copies `rows` rows of `row_bytes` contiguous bytes. Strides are in bytes.
void CopyRows(const std::byte* source,
              int64_t source_stride,
              std::byte* target,
              int64_t target_stride,
              int64_t rows,
              int64_t row_bytes);

}  // namespace jax_ub
