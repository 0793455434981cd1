// Launches the kernels of sum_kernels.cu. Also copies rows, by a kernel or by a copy
// engine.
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

// How rows are copied. num_sm and cluster_size are used only by the copy kernel.
struct CopyMethod {
  bool use_ce = true;    // true: copy engine; false: copy kernel
  int num_sm = 0;        // number of blocks; 0: the default of SumKernels::Copy
  int cluster_size = 0;  // number of blocks in a cluster; 0: no clusters
};

// Enqueues a copy of `rows` within a GPU or to a peer GPU, by a copy engine or by a
// kernel of `sums`. Does nothing if there are no rows or no bytes.
void EnqueueCopy(const Driver& driver,
                 const SumKernels& sums,
                 CUstream stream,
                 const CopyParams& rows,
                 const CopyMethod& method);

}  // namespace jax_ub
