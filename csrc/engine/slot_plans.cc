#include "engine/slot_plans.h"

#include <algorithm>
#include <string>
#include <utility>

#include "engine/communicated_tensors.h"
#include "platform/error.h"

namespace jax_ub {

Schedules::Schedules(Schedule first) : schedules_(first.num_ranks) {
  schedules_[0] = std::make_unique<const Schedule>(std::move(first));
}

const Schedule& Schedules::Of(int rank) {
  std::lock_guard lock(mutex_);
  std::unique_ptr<const Schedule>& built = schedules_.at(rank);
  if (!built) {
    const Schedule& first = *schedules_[0];
    built = std::make_unique<const Schedule>(
        MakeSchedule(first.collective, first.method, rank, first.num_ranks,
                     first.num_splits, first.variant));
  }
  return *built;
}

SlotRequirements ComputeSlotRequirements(const CallAttributes& at,
                                         const RankCall& call,
                                         const Device& device) {
  SlotRequirements plan;
  plan.collective = InfoOf(at.op).collective;
  if (!HasSchedule(plan.collective, at.method)) {
    throw UnsupportedError("jax_ub." + at.label + ": " + std::string(OpName(at.op)) +
                           " has no method " + std::string(MethodName(at.method)) +
                           ": use " + (device.enqueues() ? "" : "direct, ") +
                           "ring_exchange, pipeline or external");
  }
  const int splits = at.num_splits == 0 ? device.DefaultSplits(plan.collective)
                                        : static_cast<int>(at.num_splits);
  if (HasVariant(plan.collective, at.method, at.num_ranks, at.variant)) {
    plan.variant = at.variant;
  }
  Schedule schedule =
      MakeSchedule(plan.collective, at.method, 0, at.num_ranks, splits, plan.variant);
  plan.num_splits = schedule.num_splits;
  plan.num_slots = schedule.num_slots;
  plan.partial_dtype = device.PartialDType(at, call);
  for (const CommunicatedTensor& communicated : CommunicatedTensorsOf(at, call)) {
    const int64_t chunk_rows =
        (communicated.num_rows + at.num_ranks - 1) / at.num_ranks;
    const int64_t split_rows =
        plan.variant == Variant::kOneShot
            ? communicated.num_rows
            : (chunk_rows + plan.num_splits - 1) / plan.num_splits;
    const bool gather = IsGather(plan.collective);
    const Tensor& sent = gather ? communicated.operand : communicated.result;
    int64_t element_bytes = SizeOf(communicated.operand.dtype);
    if (!gather) {
      if (HasProduct(plan.collective)) element_bytes = SizeOf(plan.partial_dtype);
      // The slots of an all-reduce receive partial sums, and later the final sums,
      // which have the dtype of the result.
      element_bytes = std::max(element_bytes, SizeOf(communicated.result.dtype));
    }
    int64_t slot_bytes = sent.batch * split_rows * sent.features * element_bytes;
    if (communicated.scales.data != nullptr) {
      slot_bytes = RowSlice{sent, 0, split_rows}.scales_offset() +
                   RowSlice{communicated.scales, 0, split_rows}.size_bytes();
    }
    plan.slot_bytes = std::max(plan.slot_bytes, slot_bytes);
  }
  plan.schedules = std::make_shared<Schedules>(std::move(schedule));
  return plan;
}

SlotRequirements SlotPlans::Find(const CallAttributes& attributes,
                                 const RankCall& call,
                                 const Device& device) {
  std::lock_guard lock(mutex_);
  if (!plan_.schedules || !DescribeMismatch(planned_, call).empty()) {
    plan_ = ComputeSlotRequirements(attributes, call, device);
    planned_ = call;
  }
  return plan_;
}

}  // namespace jax_ub
