#include "schedule/schedule.h"

#include <algorithm>
#include <array>
#include <stdexcept>
#include <string>

#include "schedule/builder.h"

namespace jax_ub {

namespace {

constexpr std::array<std::string_view, kNumMethods> kMethodNames = {
    "direct", "ring_exchange", "pipeline", "bulk", "external"};

constexpr std::array<std::string_view, kNumVariants> kVariantNames = {
    "plain", "aggregate", "overlap_first_gemm", "one_shot"};

constexpr std::array<std::string_view, kNumCollectiveKinds> kCollectiveKindNames = {
    "all_gather_matmul", "matmul_reduce_scatter", "matmul_all_reduce",
    "all_gather",        "reduce_scatter",        "all_reduce"};

constexpr std::array<std::string_view, kNumStepKinds> kStepKindNames = {
    "multiply", "copy", "reduce", "put", "publish", "wait", "release", "wait_free"};

constexpr std::array<std::string_view, 3> kPayloadNames = {"operand", "partial", "sum"};

// Appends the steps of method "direct", which sends nothing. Every rank lets its peers
// read its operands, runs one GEMM over the operands of all ranks, and continues when
// no peer reads its operands any more. For P = 4 ranks, rank 0:
//
//   publish to 1 2 3 | wait for 3 2 1 | multiply all | release 3 2 1 | wait free 1 2 3
//
// Within one process, the rendezvous replaces the publish steps, and the common
// completion of the ranks replaces the releases (engine/cpu/collective_call.h).
void AppendDirect(ScheduleBuilder& builder) {
  builder.BeginStage();
  const int num_ranks = builder.num_ranks();
  for (int d = 1; d < num_ranks; ++d) {
    builder.Send(StepKind::kPublish, Payload::kOperand, builder.rank(), 0,
                 builder.Ahead(d), builder.SlotOf(d, 0));
  }
  const auto for_each_peer = [&](StepKind kind) {
    for (int d = 1; d < num_ranks; ++d) {
      const int peer = builder.Behind(d);
      builder.Add(kind, Payload::kOperand, peer, 0, peer, builder.SlotOf(d, 0));
    }
  };
  for_each_peer(StepKind::kWait);
  builder.MultiplyAll();
  for_each_peer(StepKind::kRelease);
  for (int d = 1; d < num_ranks; ++d) {
    builder.Add(StepKind::kWaitFree, Payload::kOperand, builder.rank(), 0,
                builder.Ahead(d), builder.SlotOf(d, 0));
  }
}

void AppendCollective(ScheduleBuilder& builder,
                      CollectiveKind collective,
                      Method method,
                      Variant variant) {
  if (method == Method::kDirect) return AppendDirect(builder);
  if (variant == Variant::kAggregate) return AppendRingOfPairs(builder);
  // With method "external", the GEMM does not overlap with the communication: it runs
  // after the gather or before the scatter.
  const bool separate_gemm = method == Method::kExternal;
  const bool multiply = HasProduct(collective) && !separate_gemm;
  if (IsGather(collective)) {
    AppendAllGather(builder, method, multiply ? StepKind::kMultiply : StepKind::kCopy);
    if (HasProduct(collective) && separate_gemm) builder.MultiplyAll();
    return;
  }
  if (HasProduct(collective) && separate_gemm) builder.MultiplyAll();
  if (variant == Variant::kOneShot) return AppendOneShot(builder, multiply);
  AppendReduceScatter(builder, multiply, variant == Variant::kOverlapFirstGemm);
  if (IsAllReduce(collective)) AppendAllGatherOfSums(builder);
}

}  // namespace

std::string_view MethodName(Method method) {
  return kMethodNames[static_cast<size_t>(method)];
}

std::string_view VariantName(Variant variant) {
  return kVariantNames[static_cast<size_t>(variant)];
}

std::string_view CollectiveKindName(CollectiveKind collective) {
  return kCollectiveKindNames[static_cast<size_t>(collective)];
}

bool IsGather(CollectiveKind collective) {
  return collective == CollectiveKind::kAllGatherMatmul ||
         collective == CollectiveKind::kAllGather;
}

bool IsAllReduce(CollectiveKind collective) {
  return collective == CollectiveKind::kMatmulAllReduce ||
         collective == CollectiveKind::kAllReduce;
}

bool HasProduct(CollectiveKind collective) {
  return collective == CollectiveKind::kAllGatherMatmul ||
         collective == CollectiveKind::kMatmulReduceScatter ||
         collective == CollectiveKind::kMatmulAllReduce;
}

std::string_view StepKindName(StepKind kind) {
  return kStepKindNames[static_cast<size_t>(kind)];
}

std::string_view PayloadName(Payload payload) {
  return kPayloadNames[static_cast<size_t>(payload)];
}

size_t CountSteps(const std::vector<Step>& steps, size_t begin, StepKind kind) {
  size_t end = begin;
  while (end < steps.size() && steps[end].kind == kind) ++end;
  return end - begin;
}

std::vector<Step> FirstOfEachPeer(const std::vector<Step>& steps, StepKind kind) {
  std::vector<Step> first;
  for (const Step& step : steps) {
    const auto same_peer = [&](const Step& other) { return other.peer == step.peer; };
    if (step.kind == kind && std::none_of(first.begin(), first.end(), same_peer)) {
      first.push_back(step);
    }
  }
  return first;
}

bool HasSchedule(CollectiveKind collective, Method method) {
  if (method == Method::kBulk) return !HasProduct(collective);
  if (method == Method::kDirect) return HasProduct(collective);
  return true;
}

bool HasVariant(CollectiveKind collective,
                Method method,
                int num_ranks,
                Variant variant) {
  switch (variant) {
    case Variant::kPlain:
      return true;
    case Variant::kAggregate:
      return collective == CollectiveKind::kAllGatherMatmul &&
             method == Method::kRingExchange && num_ranks % 2 == 0;
    case Variant::kOverlapFirstGemm:
      return (collective == CollectiveKind::kMatmulReduceScatter ||
              collective == CollectiveKind::kMatmulAllReduce) &&
             method == Method::kPipeline;
    case Variant::kOneShot:
      return IsAllReduce(collective) && method == Method::kRingExchange;
  }
  return false;
}

Schedule MakeSchedule(CollectiveKind collective,
                      Method method,
                      int rank,
                      int num_ranks,
                      int num_splits,
                      Variant variant) {
  const auto reject = [](const std::string& text) {
    throw std::invalid_argument("schedule: " + text);
  };
  if (!HasSchedule(collective, method)) {
    reject(std::string(CollectiveKindName(collective)) + " has no method " +
           std::string(MethodName(method)));
  }
  if (num_ranks < 1) reject("num_ranks is " + std::to_string(num_ranks));
  if (rank < 0 || rank >= num_ranks) {
    reject("rank " + std::to_string(rank) + " is none of " + std::to_string(num_ranks));
  }
  if (num_splits < 1) reject("num_splits is " + std::to_string(num_splits));
  if (!HasVariant(collective, method, num_ranks, variant)) {
    reject(std::string(CollectiveKindName(collective)) + " by " +
           std::string(MethodName(method)) + " of " + std::to_string(num_ranks) +
           " ranks has no variant " + std::string(VariantName(variant)));
  }
  Schedule schedule{collective, method, variant, rank, num_ranks, 1, 0, {}};
  if (method == Method::kPipeline) schedule.num_splits = num_splits;
  ScheduleBuilder builder(schedule);
  AppendCollective(builder, collective, method, variant);
  return schedule;
}

RowRange SplitRows(
    int64_t num_rows, int num_ranks, int num_splits, int chunk, int split) {
  const int64_t begin = chunk * num_rows / num_ranks;
  const int64_t size = (chunk + 1) * num_rows / num_ranks - begin;
  return {begin + split * size / num_splits, begin + (split + 1) * size / num_splits};
}

}  // namespace jax_ub
