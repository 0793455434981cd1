// Base class of the GPU devices, and the layout of a call's workspace.
#pragma once

#include <cuda.h>

#include <cstdint>
#include <vector>

#include "engine/device.h"

namespace jax_ub {

struct DeviceBytes {
  CUdeviceptr data = 0;
  int64_t size_bytes = 0;
};

// Layout of a call's workspace, which XLA allocates: scratch memory for the GEMMs of
// each lane (stream), then the tensors in the order of their allocation.
struct WorkspacePlan {
  static constexpr int64_t kAlignment = 256;
  static constexpr int64_t Align(int64_t bytes) {
    return (bytes + kAlignment - 1) / kAlignment * kAlignment;
  }

  std::vector<int64_t> scratch_bytes;  // [lane]
  int64_t tensor_bytes = 0;
  int num_events = 0;

  // Returns the size of the workspace to request from XLA, with padding for alignment.
  int64_t size_bytes() const;
};

class CudaDevice : public Device {
 public:
  bool enqueues() const override { return true; }

  // Returns the dtype of x if one GEMM computes the partial sum, because rounding it
  // hardly affects the sum over the ranks (f16 or bf16 if x is FP8). Returns f32 if a
  // sum of several GEMMs is sent, or if nothing is sent.
  DType PartialDType(const CallAttributes& attributes,
                     const RankCall& call) const override;

  // Returns the number of splits of a chunk if the call does not specify it. It is 1
  // for gathers: smaller GEMMs are slower, which costs more time than the additional
  // overlap saves.
  int DefaultSplits(CollectiveKind collective) const override;
};

}  // namespace jax_ub
