#include "engine/cuda/dry_run_device.h"

#include <algorithm>
#include <utility>

#include "engine/cuda/multicast_reduce.h"
#include "gemm/cuda/cuda_gemm.h"
#include "platform/error.h"
#include "transport/cuda/cuda_slots.h"

namespace jax_ub {

namespace {

// Distance between the fake addresses of two tensors. It is larger than any tensor.
constexpr uint64_t kAddressStep = uint64_t{1} << 44;

std::byte* Address(uint64_t area, uint64_t index) {
  return reinterpret_cast<std::byte*>(area * kAddressStep * 64 + index * kAddressStep);
}
constexpr uint64_t kOperands = 1;
constexpr uint64_t kResults = 2;
constexpr uint64_t kAllocated = 3;
constexpr uint64_t kSlots = 4;
constexpr uint64_t kScales = 5;

RankCall WithAddresses(RankCall call) {
  const auto assign_addresses = [](std::vector<Tensor>& tensors, uint64_t area) {
    for (size_t i = 0; i < tensors.size(); ++i) {
      if (tensors[i].data == nullptr) tensors[i].data = Address(area, i);
    }
  };
  assign_addresses(call.operands, kOperands);
  assign_addresses(call.results, kResults);
  assign_addresses(call.scales, kScales);
  return call;
}

}  // namespace

DryRunDevice::DryRunDevice(const CallAttributes& at, Visit visit)
    : num_product_lanes_(IsLocalCall(at) ? 1
                                         : std::max(at.kernel_options.num_lanes, 1)),
      transposes_fp8_(at.kernel_options.transposes_fp8),
      visit_(std::move(visit)) {
  plan_.scratch_bytes.resize(1 + num_product_lanes_);
}

Tensor DryRunDevice::Allocate(DType dtype,
                              int64_t batch,
                              int64_t rows,
                              int64_t features) {
  Tensor tensor{dtype, batch, rows, features, nullptr};
  // The fake addresses of allocated tensors have the same distances as the addresses
  // that the tensors will have in the workspace.
  tensor.data = Address(kAllocated, 0) + plan_.tensor_bytes;
  plan_.tensor_bytes += WorkspacePlan::Align(tensor.size_bytes());
  return tensor;
}

void DryRunDevice::Multiply(Lane lane,
                            std::vector<GemmProblem> problems,
                            const Step& step) {
  for (const GemmProblem& problem : problems) {
    int64_t& bytes = plan_.scratch_bytes[lane];
    bytes = std::max(bytes, WorkspacePlan::Align(
                                CudaGemm::WorkspaceBytes(problem, transposes_fp8_)));
    if (visit_) visit_(lane, problem);
  }
}

const std::byte* NullTransport::slot(int index) const {
  return Address(kSlots, 0) + index * CudaSlots::StrideOf(slot_bytes_);
}

CallPlan PlanCall(const CallAttributes& at,
                  const RankCall& given,
                  int rank,
                  const DryRunDevice::Visit& visit) {
  const RankCall call = WithAddresses(given);
  CallPlan plan;
  const bool is_local = IsLocalCall(at);
  DryRunDevice device(at, visit);
  if (is_local) {
    ExecuteLocal(at, call, device);
  } else {
    plan.slots = ComputeSlotRequirements(at, call, device);
    NullTransport transport(rank, at.num_ranks, plan.slots.slot_bytes);
    ExecuteRank(at, call, plan.slots, 0, transport, device, {});
  }
  plan.workspace = device.plan();
  return plan;
}

WorkspacePlan PlanByMulticast(const CallAttributes& at,
                              const RankCall& given,
                              const SlotRequirements& slots,
                              const DryRunDevice::Visit& visit) {
  const RankCall call = WithAddresses(given);
  DryRunDevice device(at, visit);
  NullTransport transport(0, at.num_ranks, slots.slot_bytes);
  ReduceByMulticast(
      at, call, slots, 0, [](const MulticastRange&) {}, transport, device);
  return device.plan();
}

void CheckRunsOnCuda(const CallAttributes& at) {
  const auto reject = [&](const std::string& text) {
    throw UnsupportedError("jax_ub." + at.label + ": " + text);
  };
  if (IsLocalCall(at)) return;
  if (at.method == Method::kDirect) {
    reject(
        "method direct reads the peers' operands in place, and on GPUs XLA's buffers "
        "are not mapped into the peers: use ring_exchange, pipeline, bulk or external");
  }
  if (at.num_ranks > kMaxRanks) {
    reject("num_ranks is " + std::to_string(at.num_ranks) + ", on GPUs at most " +
           std::to_string(kMaxRanks));
  }
}

}  // namespace jax_ub
