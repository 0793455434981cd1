#include "engine/cuda/one_kernel_reduce.h"

#include <utility>
#include <vector>

#include "engine/communicated_tensors.h"
#include "engine/gemm_builders.h"
#include "engine/lane_dependencies.h"

namespace jax_ub {

namespace {

// Returns bias and residual as addends of the sum over ranks. An addend has no batch
// dimension, because the rows of all batch elements are contiguous.
std::vector<SumAddend> AddendsOf(const CallAttributes& at, const RankCall& call) {
  std::vector<SumAddend> addends;
  const auto add = [&](const Tensor& tensor) {
    addends.push_back(
        {reinterpret_cast<uint64_t>(tensor.data), tensor.num_elements(), tensor.dtype});
  };
  if (at.has_bias) add(call.operands[FirstResidual(at) - 1]);
  if (at.has_residual) add(call.operands[FirstResidual(at)]);
  return addends;
}

}  // namespace

bool ReducesInOneKernel(const CallAttributes& at, const SlotRequirements& plan) {
  return at.num_ranks > 1 && plan.variant == Variant::kOneShot;
}

void ReduceInOneKernel(const CallAttributes& at,
                       const RankCall& call,
                       const SlotRequirements& plan,
                       double timeout_s,
                       CudaSlots& slots,
                       Device& device) {
  const CommunicatedTensor communicated = CommunicatedTensorsOf(at, call).front();
  const Tensor& out = communicated.result;
  Tensor partial = communicated.operand;
  if (HasProduct(plan.collective)) {
    LaneDependencies lanes(device);
    const Lane lane = lanes.NextProduct();
    partial = device.Allocate(plan.partial_dtype, partial.batch, communicated.num_rows,
                              out.features);
    auto products = PartialProducts(at, call, partial, 0, communicated.num_rows);
    if (!products.empty()) device.Multiply(lane, std::move(products), {});
    lanes.Await(kCommunicationLane, lanes.Record(lane));
  }
  slots.AllReduce({.partial = partial.data,
                   .dtype = partial.dtype,
                   .num_elements = out.num_elements(),
                   .addends = AddendsOf(at, call),
                   .out = out.data,
                   .out_dtype = out.dtype},
                  {at.label, kAllChunks, timeout_s});
  slots.EndCall();
}

}  // namespace jax_ub
