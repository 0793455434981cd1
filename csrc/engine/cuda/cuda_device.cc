#include "engine/cuda/cuda_device.h"

#include "engine/communicated_tensors.h"

namespace jax_ub {

namespace {

// Default number of splits of a reduction, equal to Transformer Engine's for its
// pipelined reduce-scatter.
constexpr int kDefaultSplits = 4;

}  // namespace

int64_t WorkspacePlan::size_bytes() const {
  int64_t bytes = tensor_bytes;
  for (const int64_t scratch : scratch_bytes) bytes += scratch;
  return bytes == 0 ? 0 : bytes + kAlignment;
}

DType CudaDevice::PartialDType(const CallAttributes& at, const RankCall& call) const {
  const bool rounded = at.num_kernels == 1 && at.num_ranks > 1;
  if (!rounded) return DType::kF32;
  const DType dtype = call.operands[0].dtype;
  if (!IsFp8(dtype)) return dtype;
  return call.results[0].dtype == DType::kF16 ? DType::kF16 : DType::kBF16;
}

int CudaDevice::DefaultSplits(CollectiveKind collective) const {
  return IsGather(collective) ? 1 : kDefaultSplits;
}

}  // namespace jax_ub
