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

  // Returns the size of the scales of an operand [outer, k] with one scale per block,
  // in tiles, in bytes.
  static int64_t TileBytes(int64_t outer, int64_t k);
  // Returns into how many parts a row of k elements is divided. A thread reads one
  // part.
  static int64_t NumRowParts(int64_t k) { return (k + kRowPart - 1) / kRowPart; }

  void StoreBlockScales(CUstream stream, const BlockScalesParams& params) const;
  // Throws std::invalid_argument unless kRowVector divides k.
  void ConvertRows(CUstream stream, const RowScalesParams& params) const;

 private:
  const Driver& driver_;
  Library library_;
  CUfunction block_scales_ = nullptr;
  CUfunction row_amax_ = nullptr;
  CUfunction convert_rows_ = nullptr;
};

}  // namespace jax_ub
