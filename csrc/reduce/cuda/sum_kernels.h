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

  // Reduces num_parts matrices as SumParams says; is_vectorized is filled here. Throws
  // std::invalid_argument without parts or with more than kMaxParts.
  void Sum(CUstream stream, SumParams params) const;

  // With `num_sms` blocks (0: 16), in clusters of `cluster_size` where the device has
  // them (0 or 1: none; num_sms is rounded up to a multiple). is_vectorized is filled
  // here.
  void Copy(CUstream stream, CopyParams params, int num_sms, int cluster_size) const;

 private:
  const Driver& driver_;
  int num_sms_ = 0;  // of the device
  bool has_clusters_ = false;
  Library library_;
  CUkernel sum_ = nullptr;
  CUkernel copy_ = nullptr;
};

}  // namespace jax_ub
