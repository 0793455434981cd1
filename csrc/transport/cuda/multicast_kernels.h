// Launches the kernel that sums by multicast (multicast_kernels.cu).
#pragma once

#include <cuda.h>

#include "platform/cuda/driver.h"
#include "platform/cuda/owners.h"
#include "transport/cuda/multicast_params.h"

namespace jax_ub {

// Of the context that is current when it is made, on a device that has multicast. May be
// used by any thread, with that context current.
class MulticastKernels {
 public:
  explicit MulticastKernels(const Driver& driver);

  // With at most `num_blocks` blocks (0: 32).
  void Sum(CUstream stream, const MulticastSumParams& params, int num_blocks) const;

 private:
  const Driver& driver_;
  Library library_;
  CUfunction sum_ = nullptr;
};

}  // namespace jax_ub
