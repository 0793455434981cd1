// Launches the kernels of fp8_scale_kernels.cu.
#pragma once

#include <cuda.h>

#include <cstdint>

#include "gemm/cuda/fp8_scale_params.h"
#include "platform/cuda/driver.h"
#include "platform/cuda/owners.h"

namespace jax_ub {

// The kernels, loaded in the CUDA context that is current at construction. Thread-safe.
// The calling thread must have the same context current.
class Fp8ScaleKernels {
 public:
  explicit Fp8ScaleKernels(const Driver& driver);

  // Returns how many bytes the e8m0 scales of an operand [outer, k] take. They have the
  // layout of cuBLASLt: tiles of 128 rows and 4 blocks of 32 elements along k.
  static int64_t TileBytes(int64_t outer, int64_t k);
  // Returns into how many parts ConvertRows divides a row of k elements. One thread
  // finds the largest element of a part.
  static int64_t NumRowParts(int64_t k) { return (k + kRowPart - 1) / kRowPart; }

  // Stores e8m0 scales in the tiles that cuBLASLt reads. If params.converts is true,
  // also converts the operand to scales of blocks along k.
  void StoreBlockScales(CUstream stream, const BlockScalesParams& params) const;
  // Converts an FP8 operand [outer, k] with one scale per index k to one power-of-two
  // scale per row. Throws std::invalid_argument unless kRowVector divides k.
  void ConvertRows(CUstream stream, const RowScalesParams& params) const;

 private:
  const Driver& driver_;
  Library library_;
  CUfunction block_scales_ = nullptr;
  CUfunction row_amax_ = nullptr;
  CUfunction convert_rows_ = nullptr;
};

}  // namespace jax_ub
