#include "reduce/cuda/row_copies.h"

#include <algorithm>
#include <cstdint>
#include <limits>

namespace jax_ub {

namespace {

// What a driver takes for the distance of two rows (CU_DEVICE_ATTRIBUTE_MAX_PITCH).
constexpr int64_t kMaxPitchBytes = std::numeric_limits<int32_t>::max();

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
                 const CopyWay& way) {
  if (rows.num_rows == 0 || rows.row_bytes == 0) return;
  if (!way.use_ce) return sums.Copy(stream, rows, way.num_sm, way.cluster_size);
  const bool is_dense =
      rows.from_stride == rows.row_bytes && rows.to_stride == rows.row_bytes;
  if (rows.num_rows == 1 || is_dense) {
    return CopyBlock(driver, stream, rows.to, rows.from,
                     rows.num_rows * rows.row_bytes);
  }
  if (std::max(rows.from_stride, rows.to_stride) > kMaxPitchBytes) {
    for (int64_t row = 0; row < rows.num_rows; ++row) {
      CopyBlock(driver, stream, rows.to + row * rows.to_stride,
                rows.from + row * rows.from_stride, rows.row_bytes);
    }
    return;
  }
  // As addresses of any device: of a peer's memory, too.
  CUDA_MEMCPY2D copy = {};
  copy.srcMemoryType = CU_MEMORYTYPE_UNIFIED;
  copy.srcDevice = rows.from;
  copy.srcPitch = rows.from_stride;
  copy.dstMemoryType = CU_MEMORYTYPE_UNIFIED;
  copy.dstDevice = rows.to;
  copy.dstPitch = rows.to_stride;
  copy.WidthInBytes = rows.row_bytes;
  copy.Height = rows.num_rows;
  Check(driver, driver.Memcpy2DAsync(&copy, stream), "cuMemcpy2DAsync");
}

}  // namespace jax_ub
