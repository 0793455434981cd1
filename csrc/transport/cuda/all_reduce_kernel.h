// Launches the kernel that all-reduces few rows in one exchange (all_reduce_kernel.cu).
#pragma once

#include <cuda.h>

#include "platform/cuda/driver.h"
#include "platform/cuda/owners.h"
#include "transport/cuda/all_reduce_params.h"

namespace jax_ub {

// The all-reduce kernel, loaded in the CUDA context that is current at construction.
// Thread-safe. The same context must be current on each thread that calls Run.
class AllReduceKernel {
 public:
  explicit AllReduceKernel(const Driver& driver);

  // Returns the number of thread blocks of a launch. The number depends only on
  // `num_elements`, so all ranks launch the same number of blocks.
  static int NumBlocks(int64_t num_elements);

  // Enqueues the all-reduce on `stream`. Sets params.is_aligned itself, so the caller
  // need not set it.
  void Run(CUstream stream, AllReduceParams params) const;

 private:
  const Driver& driver_;
  Library library_;
  CUfunction all_reduce_ = nullptr;
};

}  // namespace jax_ub
