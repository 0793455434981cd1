// Sums and copies matrices that are stored in the buffers of several ranks.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "gemm/dtype.h"

namespace jax_ub {

// A matrix that is only read, such as an addend. Its rows are contiguous.
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

// Computes
//
//   out[r, c] = round(((chunks[0][r, c] + chunks[1][r, c]) + chunks[2][r, c]) + ...)
//
// Adds in f32, in the order of `chunks` (the ranks), so that every rank gets the same
// bits. `out` may be the memory of one chunk. Throws std::invalid_argument if `chunks`
// is empty.
void SumChunks(std::span<const ConstMatrix> chunks,
               int64_t rows,
               int64_t columns,
               const Matrix& out);

// Copies `rows` rows of `row_bytes` contiguous bytes each. Strides are in bytes.
void CopyRows(const std::byte* source,
              int64_t source_stride,
              std::byte* target,
              int64_t target_stride,
              int64_t rows,
              int64_t row_bytes);

}  // namespace jax_ub
