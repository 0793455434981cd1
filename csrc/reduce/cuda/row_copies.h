// Copies rows within a GPU or to a peer GPU, with a copy engine or with a kernel.
#pragma once

#include <cuda.h>

#include "platform/cuda/driver.h"
#include "reduce/cuda/sum_kernels.h"

namespace jax_ub {

// How rows are copied. The last two members are for the copy kernel.
struct CopyMethod {
  bool use_ce = true;    // true: copy engine; false: copy kernel
  int num_sm = 0;        // number of blocks; 0: the default of SumKernels::Copy
  int cluster_size = 0;  // number of blocks in a cluster; 0: no clusters
};

// Enqueues a copy of `rows` on `stream`, by a copy engine or by a kernel of `sums`.
// Does nothing if there are no rows or no bytes.
void EnqueueCopy(const Driver& driver,
                 const SumKernels& sums,
                 CUstream stream,
                 const CopyParams& rows,
                 const CopyMethod& way);

}  // namespace jax_ub
