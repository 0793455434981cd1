// Launches the flag kernels (flag_kernels.cu): one warp each, so that a copy engine's
// work can be announced and waited for without the host, also in a replayed graph.
#pragma once

#include <cuda.h>

#include "platform/cuda/driver.h"
#include "platform/cuda/owners.h"
#include "transport/cuda/flag_params.h"

namespace jax_ub {

// Of the context that is current when it is made. All kernels are loaded then: lazy
// loading would synchronize with a wait kernel that already spins. May be used by any
// thread, with that context current.
class FlagKernels {
 public:
  explicit FlagKernels(const Driver& driver);

  void Signal(CUstream stream, const SignalParams& params) const;
  void Wait(CUstream stream, const WaitParams& params) const;
  void End(CUstream stream, const SignalParams& params) const;
  void CheckPartition(CUstream stream, const PartitionCheckParams& params) const;
  void FillNan(CUstream stream, const NanFillParams& params) const;

 private:
  const Driver& driver_;
  Library library_;
  CUfunction signal_ = nullptr;
  CUfunction wait_ = nullptr;
  CUfunction end_ = nullptr;
  CUfunction check_place_ = nullptr;
  CUfunction spoil_ = nullptr;
};

}  // namespace jax_ub
