// Base class of the GPU devices, and the layout of a call's workspace.
#pragma once

#include <cuda.h>

#include <cstdint>
#include <numeric>
#include <vector>

#include "engine/device.h"

namespace jax_ub {

struct DeviceBytes {
  CUdeviceptr data = 0;
  int64_t size_bytes = 0;
};

// Layout of a call's workspace, which XLA allocates. It begins with scratch memory for
// the GEMMs of each lane (stream), followed by the tensors in the order of their
// allocation.
struct WorkspacePlan {
  static constexpr int64_t kAlignment = 256;
  static constexpr int64_t Align(int64_t bytes) {
    return (bytes + kAlignment - 1) / kAlignment * kAlignment;
  }

  std::vector<int64_t> scratch_bytes;  // [lane]
  int64_t tensor_bytes = 0;
  int num_events = 0;

  // Returns the size of the workspace to request from XLA, with padding for alignment.
  int64_t size_bytes() const {
    const int64_t bytes =
        std::accumulate(scratch_bytes.begin(), scratch_bytes.end(), tensor_bytes);
    return bytes == 0 ? 0 : bytes + kAlignment;
  }
};

class CudaDevice : public Device {
 public:
  bool enqueues() const override { return true; }

  // Returns the dtype in which partial sums are sent. If a partial sum is the result of
  // one GEMM, it is sent in the dtype of x (f16 or bf16 if x is FP8), because this
  // rounding hardly affects the sum over the ranks. If it is the sum of several GEMMs,
  // or if nothing is sent, the dtype is f32.
  DType PartialDType(const CallAttributes& at, const RankCall& call) const override {
    const bool is_rounded = at.num_kernels == 1 && at.num_ranks > 1;
    if (!is_rounded) return DType::kF32;
    const DType dtype = call.operands[0].dtype;
    if (!IsFp8(dtype)) return dtype;
    return call.results[0].dtype == DType::kF16 ? DType::kF16 : DType::kBF16;
  }

  // Gathers have one split, because smaller GEMMs are slower, which costs more time
  // than the additional overlap saves.
  int DefaultSplits(CollectiveKind collective) const override {
    return IsGather(collective) ? 1 : kDefaultSplits;
  }
};

}  // namespace jax_ub
