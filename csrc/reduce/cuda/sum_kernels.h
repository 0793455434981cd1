// Launches the kernels of sum_kernels.cu.
#pragma once

#include <cuda.h>

#include "platform/cuda/driver.h"
#include "platform/cuda/owners.h"
#include "reduce/cuda/sum_params.h"

namespace jax_ub {

// The kernels, loaded in the CUDA context that is current at construction. Thread-safe.
// The calling thread must have the same context current.
class SumKernels {
 public:
  SumKernels(const Driver& driver, CUdevice device);

  // Enqueues a sum of matrices on `stream`. Determines params.is_aligned, which the
  // caller need not set. Throws std::invalid_argument unless there are 1 to kMaxParts
  // addends.
  void Sum(CUstream stream, SumParams params) const;

  // Enqueues a copy of rows on `stream`. Determines params.unit_bytes, which the caller
  // need not set. Uses `num_blocks` thread blocks (0: 16), in clusters of
  // `cluster_size` blocks if the device supports clusters (0 or 1: no clusters). Rounds
  // the number of blocks up to whole clusters.
  void Copy(CUstream stream, CopyParams params, int num_blocks, int cluster_size) const;

  // Enqueues a transposition of bytes on `stream`. Throws std::invalid_argument unless
  // kTransposedTile divides all parameters: addresses, sizes and strides.
  void Transpose(CUstream stream, const TransposeParams& params) const;

 private:
  const Driver& driver_;
  int num_sms_ = 0;  // multiprocessors of the device
  bool has_clusters_ = false;
  Library library_;
  CUfunction sum_ = nullptr;
  CUfunction copy_ = nullptr;
  CUfunction transpose_ = nullptr;
};

}  // namespace jax_ub
