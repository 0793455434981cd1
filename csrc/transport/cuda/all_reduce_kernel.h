// Launches the kernel that all-reduces few rows in one exchange (all_reduce_kernel.cu).
#pragma once

#include <cuda.h>

#include "platform/cuda/driver.h"
#include "platform/cuda/owners.h"
#include "transport/cuda/all_reduce_params.h"

namespace jax_ub {

// The all-reduce kernel, loaded in the CUDA context that is current at construction.
// Thread-safe. The calling thread must have the same context current.
class AllReduceKernel {
 public:
  explicit AllReduceKernel(const Driver& driver);

  // Returns the number of thread blocks of a launch. It depends only on the number of
  // elements, so all ranks launch the same number.
  static int NumBlocks(int64_t num_elements);

  // Enqueues the all-reduce on `stream`. Determines params.is_aligned, which the caller
  // need not set.
  void Run(CUstream stream, AllReduceParams params) const;

 private:
  const Driver& driver_;
  Library library_;
  CUfunction all_reduce_ = nullptr;
};

}  // namespace jax_ub
