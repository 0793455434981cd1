// Parameters of the kernel jax_ub_block_scales. Shared by the kernel, its launcher and
// its host emulation (tests/csrc/cuda/emulated_kernels.h). Addresses are CUdeviceptr
// values.
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

// Parameters of the kernel, which stores the e8m0 scales of an FP8 operand [outer, 32 *
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

inline constexpr char kBlockScalesKernel[] = "jax_ub_block_scales";
// The number of threads in a block: one for each row of a tile.
inline constexpr int kBlockScalesThreads = static_cast<int>(kScaleTileRows);

}  // namespace jax_ub
