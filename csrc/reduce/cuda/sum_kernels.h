// Launches the kernels of sum_kernels.cu.
#pragma once

#include <cuda.h>

#include "platform/cuda/driver.h"
#include "platform/cuda/owners.h"
#include "reduce/cuda/sum_params.h"

namespace jax_ub {

// The kernels of one device. The constructor loads them in the current context. Any
// thread may use them while this context is current.
class SumKernels {
 public:
  SumKernels(const Driver& driver, CUdevice device);

  // Enqueues a sum; sets params.is_aligned itself. Throws std::invalid_argument unless
  // there are 1 to kMaxParts parts.
  void Sum(CUstream stream, SumParams params) const;

  // Enqueues a copy; sets params.unit_bytes itself. Uses `num_blocks` blocks (0: 16),
  // in clusters of `cluster_size` if the device supports clusters (0 or 1: no
  // clusters). The number of blocks is rounded up to a multiple of the cluster size.
  void Copy(CUstream stream, CopyParams params, int num_blocks, int cluster_size) const;

  // Enqueues a transposition. Throws std::invalid_argument unless all parameters are
  // multiples of kTransposedTile.
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
