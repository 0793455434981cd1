// Launches the kernel that sums over all ranks with multicast (multicast_kernels.cu).
#pragma once

#include <cuda.h>

#include "platform/cuda/driver.h"
#include "platform/cuda/owners.h"
#include "transport/cuda/multicast_params.h"

namespace jax_ub {

// The multicast kernels, loaded in the CUDA context that is current at construction.
// The device of the context must support multicast. Thread-safe. The same context must
// be current on each thread that calls Sum.
class MulticastKernels {
 public:
  explicit MulticastKernels(const Driver& driver);

  // Enqueues a sum over all ranks' memory on `stream`. Uses at most `num_blocks` thread
  // blocks (0: the default, 32).
  void Sum(CUstream stream, const MulticastSumParams& params, int num_blocks) const;

 private:
  const Driver& driver_;
  Library library_;
  CUfunction sum_ = nullptr;
};

}  // namespace jax_ub
