// Launches the kernels of fp8_scale_kernels.cu.
#pragma once

#include <cuda.h>

#include <cstdint>

#include "gemm/cuda/fp8_scale_params.h"
#include "platform/cuda/driver.h"
#include "platform/cuda/owners.h"

namespace jax_ub {

// The kernels of one device. The constructor loads them in the current context. Any
// thread may use them while this context is current.
class Fp8ScaleKernels {
 public:
  explicit Fp8ScaleKernels(const Driver& driver);

  // Returns the size in bytes of scales of blocks, in tiles, for an operand [outer, k].
  static int64_t TileBytes(int64_t outer, int64_t k);
  // Returns the number of parts of a row of k elements.
  static int64_t NumRowParts(int64_t k) { return (k + kRowPart - 1) / kRowPart; }

  void StoreBlockScales(CUstream stream, const BlockScalesParams& params) const;
  // Throws std::invalid_argument unless k is a multiple of kRowVector.
  void ConvertRows(CUstream stream, const RowScalesParams& params) const;

 private:
  const Driver& driver_;
  Library library_;
  CUfunction block_scales_ = nullptr;
  CUfunction row_amax_ = nullptr;
  CUfunction convert_rows_ = nullptr;
};

}  // namespace jax_ub
