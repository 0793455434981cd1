// Launches the flag kernels (flag_kernels.cu). With these kernels, the streams of the
// ranks signal to each other and wait for each other without the host, also in a
// replayed CUDA graph. The kernels that signal and wait have one warp.
#pragma once

#include <cuda.h>

#include "platform/cuda/driver.h"
#include "platform/cuda/owners.h"
#include "transport/cuda/flag_params.h"

namespace jax_ub {

// The flag kernels, loaded in the CUDA context that is current at construction.
//
// The constructor loads all kernels. Loading a kernel later would synchronize with the
// device, on which a wait kernel may be running. Thread-safe. The same context must be
// current on each thread that calls a method.
class FlagKernels {
 public:
  explicit FlagKernels(const Driver& driver);

  void Signal(CUstream stream, const SignalParams& params) const;
  void Wait(CUstream stream, const WaitParams& params) const;
  void End(CUstream stream, const EndParams& params) const;
  void CheckPartition(CUstream stream, const PartitionCheckParams& params) const;
  void FillNan(CUstream stream, const NanFillParams& params) const;

 private:
  const Driver& driver_;
  Library library_;
  CUfunction signal_ = nullptr;
  CUfunction wait_ = nullptr;
  CUfunction end_ = nullptr;
  CUfunction check_partition_ = nullptr;
  CUfunction fill_nan_ = nullptr;
};

}  // namespace jax_ub
