// Launches the kernels that sum and copy (sum_kernels.cu).
#pragma once

#include <cuda.h>

#include "platform/cuda/driver.h"
#include "platform/cuda/owners.h"
#include "reduce/cuda/sum_params.h"

namespace jax_ub {

// Of the context that is current when it is made, and all loaded then. May be used by any
// thread, with that context current.
class SumKernels {
 public:
  SumKernels(const Driver& driver, CUdevice device);

  // Fills in is_aligned. Throws std::invalid_argument without parts or with more than
  // kMaxParts.
  void Sum(CUstream stream, SumParams params) const;

  // With `num_blocks` blocks (0: 16), in clusters of `cluster_size` where the device has
  // them (0 or 1: none; the blocks are rounded up to a multiple). Fills in unit_bytes.
  void Copy(CUstream stream, CopyParams params, int num_blocks, int cluster_size) const;

 private:
  const Driver& driver_;
  int num_sms_ = 0;  // of the device
  bool has_clusters_ = false;
  Library library_;
  CUfunction sum_ = nullptr;
  CUfunction copy_ = nullptr;
};

}  // namespace jax_ub
