#include "reduce/cuda/sum_kernels.h"

#include <algorithm>
#include <span>
#include <stdexcept>
#include <string>

#include "gemm/views.h"
#include "platform/cuda/launch.h"

namespace jax_ub {

// The compiled code of sum_kernels.cu (a fatbin).
extern const unsigned char kSumKernels[];

namespace {

constexpr int64_t kVectorBytes = 16;
constexpr int64_t kElementsPerThread = 16;
constexpr int64_t kSumBlocksPerSm =
    7;  // the number of blocks that fit on an SM at once
constexpr int kDefaultCopyBlocks = 16;
constexpr int64_t kTransposeBlocksPerSm = 4;
// Maximum number of rows that EnqueueCopy copies by a copy engine, row by row. For more
// rows, a single kernel takes less time. Usually there are few large rows: one per
// batch element.
constexpr int64_t kMostCopyEngineRows = 64;

bool IsDense(const SumPart& part, int64_t columns) {
  return part.row_stride == columns;
}

bool IsAligned(const SumPart& part, bool one_row) {
  const int64_t stride = one_row ? 0 : part.row_stride * SizeOf(part.dtype);
  return part.data % kVectorBytes == 0 && stride % kVectorBytes == 0;
}

// Turns all matrices into a single row if none of them has gaps between its rows.
void Flatten(SumParams& params) {
  const std::span<const SumPart> parts(params.parts, params.num_parts);
  const auto dense = [&](const SumPart& part) { return IsDense(part, params.columns); };
  if (!dense(params.out) || !std::all_of(parts.begin(), parts.end(), dense)) return;
  params.columns *= params.rows;
  params.rows = 1;
}

void Flatten(CopyParams& params) {
  if (params.from_stride != params.row_bytes || params.to_stride != params.row_bytes) {
    return;
  }
  params.row_bytes *= params.num_rows;
  params.num_rows = 1;
}

uint32_t UnitOf(const CopyParams& params) {
  uint64_t all = params.from | params.to | static_cast<uint64_t>(params.row_bytes);
  if (params.num_rows > 1) {
    all |= static_cast<uint64_t>(params.from_stride | params.to_stride);
  }
  // The lowest set bit of all addresses, sizes and 16 together is the largest power of
  // two, at most 16, that divides all addresses and sizes.
  return static_cast<uint32_t>((all | kVectorBytes) & -(all | kVectorBytes));
}

int AttributeOf(const Driver& driver, CUdevice device, CUdevice_attribute attribute) {
  int value = 0;
  Check(driver, driver.DeviceGetAttribute(&value, attribute, device),
        "cuDeviceGetAttribute");
  return value;
}

}  // namespace

SumKernels::SumKernels(const Driver& driver, CUdevice device)
    : driver_(driver),
      num_sms_(AttributeOf(driver, device, CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT)),
      has_clusters_(AttributeOf(driver,
                                device,
                                CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR) >= 9),
      library_(driver, kSumKernels),
      sum_(library_.Function(kSumKernel)),
      copy_(library_.Function(kCopyKernel)),
      transpose_(library_.Function(kTransposeKernel)) {}

void SumKernels::Sum(CUstream stream, SumParams params) const {
  if (params.num_parts < 1 || params.num_parts > kMaxParts) {
    throw std::invalid_argument("SumKernels: " + std::to_string(params.num_parts) +
                                " parts to sum, expected 1 to " +
                                std::to_string(kMaxParts));
  }
  if (params.rows == 0 || params.columns == 0) return;
  Flatten(params);
  const std::span<const SumPart> parts(params.parts, params.num_parts);
  const bool one_row = params.rows == 1;
  const auto aligned = [&](const SumPart& part) { return IsAligned(part, one_row); };
  params.is_aligned =
      aligned(params.out) && std::all_of(parts.begin(), parts.end(), aligned);
  const int64_t per_block = kElementsPerThread * kSumThreads;
  const int64_t blocks = (params.rows * params.columns + per_block - 1) / per_block;
  LaunchKernel(
      driver_, sum_,
      LaunchConfig(stream, std::min(blocks, kSumBlocksPerSm * num_sms_), kSumThreads),
      params);
}

void SumKernels::Copy(CUstream stream,
                      CopyParams params,
                      int num_blocks,
                      int cluster_size) const {
  if (params.num_rows == 0 || params.row_bytes == 0) return;
  Flatten(params);
  params.unit_bytes = UnitOf(params);
  int blocks = num_blocks > 0 ? num_blocks : kDefaultCopyBlocks;
  const int cluster = has_clusters_ ? std::max(cluster_size, 1) : 1;
  blocks = (blocks + cluster - 1) / cluster * cluster;
  CUlaunchConfig config = LaunchConfig(stream, blocks, kCopyThreads);
  CUlaunchAttribute attribute = {};
  attribute.id = CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION;
  attribute.value.clusterDim.x = static_cast<unsigned>(cluster);
  attribute.value.clusterDim.y = attribute.value.clusterDim.z = 1;
  if (cluster > 1) {
    config.attrs = &attribute;
    config.numAttrs = 1;
  }
  LaunchKernel(driver_, copy_, config, params);
}

void SumKernels::Transpose(CUstream stream, const TransposeParams& params) const {
  for (const int64_t one : {static_cast<int64_t>(params.from | params.to), params.rows,
                            params.columns, params.from_stride, params.to_stride}) {
    if (one % kTransposedTile == 0) continue;
    throw std::invalid_argument(
        "SumKernels: a matrix of " + std::to_string(params.rows) + " x " +
        std::to_string(params.columns) + " bytes, " +
        std::to_string(params.from_stride) + " and " +
        std::to_string(params.to_stride) +
        " bytes between rows, cannot be transposed: addresses and sizes must be "
        "multiples of " +
        std::to_string(kTransposedTile));
  }
  if (params.rows == 0 || params.columns == 0) return;
  const int64_t per_block = int64_t{kTransposeThreads} * kTransposedTile;
  const int64_t blocks =
      (params.rows / kTransposedTile * params.columns + per_block - 1) / per_block;
  LaunchKernel(driver_, transpose_,
               LaunchConfig(stream, std::min(blocks, kTransposeBlocksPerSm * num_sms_),
                            kTransposeThreads),
               params);
}

void EnqueueCopy(const Driver& driver,
                 const SumKernels& sums,
                 CUstream stream,
                 const CopyParams& rows,
                 const CopyMethod& method) {
  if (rows.num_rows == 0 || rows.row_bytes == 0) return;
  CopyParams blocks = rows;
  Flatten(blocks);
  // Rows are copied one by one rather than with cuMemcpy2DAsync: XLA updates the
  // addresses in captured CUDA graphs, which CUDA supports for one-dimensional copies
  // only.
  if (!method.use_ce || blocks.num_rows > kMostCopyEngineRows) {
    return sums.Copy(stream, rows, method.num_sm, method.cluster_size);
  }
  for (int64_t row = 0; row < blocks.num_rows; ++row) {
    Check(driver,
          driver.MemcpyAsync(blocks.to + row * blocks.to_stride,
                             blocks.from + row * blocks.from_stride, blocks.row_bytes,
                             stream),
          "cuMemcpyAsync");
  }
}

}  // namespace jax_ub
