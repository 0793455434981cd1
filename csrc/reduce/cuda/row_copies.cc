#include "reduce/cuda/row_copies.h"

#include <cstdint>

namespace jax_ub {

namespace {

// Up to this many rows, each row is one copy. For more, one kernel is cheaper. Usually
// there are few large rows: one per batch element.
constexpr int64_t kMostBlocks = 64;

void CopyBlock(const Driver& driver,
               CUstream stream,
               CUdeviceptr to,
               CUdeviceptr from,
               int64_t size_bytes) {
  Check(driver, driver.MemcpyAsync(to, from, size_bytes, stream), "cuMemcpyAsync");
}

}  // namespace

void EnqueueCopy(const Driver& driver,
                 const SumKernels& sums,
                 CUstream stream,
                 const CopyParams& rows,
                 const CopyMethod& way) {
  if (rows.num_rows == 0 || rows.row_bytes == 0) return;
  if (!way.use_ce) return sums.Copy(stream, rows, way.num_sm, way.cluster_size);
  const bool is_dense =
      rows.from_stride == rows.row_bytes && rows.to_stride == rows.row_bytes;
  if (rows.num_rows == 1 || is_dense) {
    return CopyBlock(driver, stream, rows.to, rows.from,
                     rows.num_rows * rows.row_bytes);
  }
  // Copies row by row rather than with cuMemcpy2DAsync. XLA updates the addresses in
  // captured CUDA graphs, which CUDA supports for one-dimensional copies only.
  if (rows.num_rows > kMostBlocks) {
    return sums.Copy(stream, rows, way.num_sm, way.cluster_size);
  }
  for (int64_t row = 0; row < rows.num_rows; ++row) {
    CopyBlock(driver, stream, rows.to + row * rows.to_stride,
              rows.from + row * rows.from_stride, rows.row_bytes);
  }
}

}  // namespace jax_ub
