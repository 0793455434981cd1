// Parameters of the kernels that prepare scales of FP8 operands, and operands with new
// scales. Shared by the kernels, their launcher and their host emulation
// (tests/csrc/cuda/emulated_kernels.h). Addresses are CUdeviceptr values.
#pragma once

#include <cstdint>

#include "gemm/dtype.h"

namespace jax_ub {

// The number of elements along the contracted dimension that share an e8m0 scale.
inline constexpr int64_t kScaledBlock = 32;

// cuBLASLt reads e8m0 scales in tiles of 512 bytes. A tile has the scales of 128 rows of
// the operand (its outer indices) and of 4 consecutive blocks. Tiles run along the
// blocks first. In a tile, the scale of row r and block b is byte
//   r % 32 * 16 + r / 32 * 4 + b
inline constexpr int64_t kScaleTileRows = 128;
inline constexpr int64_t kScaleTileBlocks = 4;
inline constexpr int64_t kScaleTileBytes = kScaleTileRows * kScaleTileBlocks;

// A matrix of bytes, in which element (o, k) has the address data + o * outer_stride +
// k * inner_stride. `o` is the dimension that is not contracted.
struct ByteMatrix {
  uint64_t data = 0;
  int64_t outer_stride = 0;
  int64_t inner_stride = 0;
};

// Parameters of the kernel jax_ub_block_scales, which stores the e8m0 scales of an FP8 operand [outer, 32 *
// num_blocks] as cuBLASLt reads them. Blocks are along k: element (o, k) has the scale
// scales(o, k / 32). With `converts`, blocks are along the outer dimension: element
// (o, k) has the scale scales(o / 32, k). The kernel then also stores `converted`, the
// values with new scales, whose blocks are along k.
struct BlockScalesParams {
  ByteMatrix scales;
  int64_t outer;
  int64_t num_blocks;
  uint64_t to;  // the tiles; all bytes without a scale become zero
  // Used only with `converts`.
  ByteMatrix values;
  ByteMatrix converted;
  DType dtype;  // of the values
  bool converts;
};

// Parameters of the kernels jax_ub_row_amax and jax_ub_convert_rows. Element (o, k) of
// the FP8 operand [outer, k] has the f32 scale scales[k]. The first kernel stores the
// largest |value| * scale of each row and part of it, and the second one `converted`, the
// values with one scale per row, which is a power of two.
struct RowScalesParams {
  ByteMatrix values;
  uint64_t scales;
  int64_t outer;
  int64_t k;
  uint64_t largest;    // f32 [number of parts, outer]
  uint64_t to;         // f32 [outer]: the scales of the rows
  uint64_t converted;  // [outer, k], contiguous along k
  DType dtype;
};

// The number of elements along k in a part of a row, which a thread reads.
inline constexpr int64_t kRowPart = 256;
// The number of elements that a thread stores at once. It divides k.
inline constexpr int64_t kRowVector = 16;

inline constexpr char kBlockScalesKernel[] = "jax_ub_block_scales";
inline constexpr char kRowAmaxKernel[] = "jax_ub_row_amax";
inline constexpr char kConvertRowsKernel[] = "jax_ub_convert_rows";
// The number of threads in a block of jax_ub_block_scales: one for each row of a tile.
inline constexpr int kBlockScalesThreads = static_cast<int>(kScaleTileRows);
inline constexpr int kRowScalesThreads = 128;

}  // namespace jax_ub
