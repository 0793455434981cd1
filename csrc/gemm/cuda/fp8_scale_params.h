// Parameters of the kernels that prepare the scales of FP8 operands, and that convert
// operands to new scales. The kernels, their launcher and their host emulation
// (tests/csrc/cuda/emulated_kernels.h) share them. Addresses are CUdeviceptr values.
#pragma once

#include <cstdint>

#include "gemm/dtype.h"

namespace jax_ub {

// Number of elements along the contracted dimension that share an e8m0 scale.
inline constexpr int64_t kScaledBlock = 32;

// The size of the tiles in which cuBLASLt reads e8m0 scales.
//
// A tile has 512 bytes: the scales of 128 rows of the operand (its outer indices) and 4
// consecutive blocks. The next tile has the next blocks of the same rows. Within a
// tile, the scale of row r and block b is byte
//
//   r % 32 * 16 + r / 32 * 4 + b
inline constexpr int64_t kScaleTileRows = 128;
inline constexpr int64_t kScaleTileBlocks = 4;
inline constexpr int64_t kScaleTileBytes = kScaleTileRows * kScaleTileBlocks;

// A matrix of bytes. Element (o, k) is at data + o * outer_stride + k * inner_stride,
// where k is the contracted dimension.
struct ByteMatrix {
  uint64_t data = 0;
  int64_t outer_stride = 0;
  int64_t inner_stride = 0;
};

// Parameters of the kernel jax_ub_block_scales, which stores the e8m0 scales of an FP8
// operand [outer, 32 * num_blocks] in the layout that cuBLASLt reads. Element (o, k)
// has the scale scales(o, k / 32).
//
// With `converts`, element (o, k) has the scale scales(o / 32, k) instead. The kernel
// then computes new scales for blocks along k, and also stores `converted`, the values
// that have these scales.
struct BlockScalesParams {
  ByteMatrix scales;
  int64_t outer;
  int64_t num_blocks;
  uint64_t to;  // the tiles; all bytes without a scale become zero
  // The operand before and after the conversion. Used only if `converts` is true.
  ByteMatrix values;
  ByteMatrix converted;
  DType dtype;  // of the values
  bool converts;
};

// Parameters of the kernels jax_ub_row_amax and jax_ub_convert_rows, for an FP8 operand
// [outer, k] in which element (o, k) has the f32 scale scales[k]. The first kernel
// stores the largest |value| * scale of each part of a row. The second kernel stores
// `converted`: values that have a single scale per row, which is a power of two.
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

// Number of elements in a part of a row. One thread reads a part.
inline constexpr int64_t kRowPart = 256;
// Number of elements that a thread stores at once, in 16 bytes. k must be a multiple of
// this number.
inline constexpr int64_t kRowVector = 16;

inline constexpr char kBlockScalesKernel[] = "jax_ub_block_scales";
inline constexpr char kRowAmaxKernel[] = "jax_ub_row_amax";
inline constexpr char kConvertRowsKernel[] = "jax_ub_convert_rows";
// Numbers of threads in a thread block. jax_ub_block_scales has one thread per row of a
// tile of scales. The other kernels have kRowScalesThreads threads.
inline constexpr int kBlockScalesThreads = static_cast<int>(kScaleTileRows);
inline constexpr int kRowScalesThreads = 128;

}  // namespace jax_ub
