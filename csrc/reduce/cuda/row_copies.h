// Copies of rows on a GPU or to a peer's, by a copy engine or by multiprocessors.
#pragma once

#include <cuda.h>

#include "platform/cuda/driver.h"
#include "reduce/cuda/sum_kernels.h"

namespace jax_ub {

// Who copies.
struct CopyMethod {
  bool use_ce = true;    // a copy engine; else the copy kernel:
  int num_sm = 0;        // its blocks; 0: its own default
  int cluster_size = 0;  // of them
};

// Enqueues it; nothing where there is nothing to copy.
void EnqueueCopy(const Driver& driver,
                 const SumKernels& sums,
                 CUstream stream,
                 const CopyParams& rows,
                 const CopyMethod& way);

}  // namespace jax_ub
