// Searches consecutive calls of every kind for errors of the protocol, with the real
// schedules and the code that enqueues them.
#pragma once

#include <algorithm>
#include <functional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "cuda/protocol_model.h"
#include "cuda/recorded_program.h"
#include "schedule/schedule.h"

namespace jax_ub {

struct Kind {
  CollectiveKind collective;
  Method method;
  int num_splits;
  Variant variant = Variant::kPlain;
  Reduction reduction = Reduction::kSchedule;
};

// One collective for each use of slots, without regard to GEMMs; bulk and external send
// as pipeline does with one piece.
inline constexpr Kind kKinds[] = {
    {CollectiveKind::kAllGatherMatmul, Method::kRingExchange, 1},
    {CollectiveKind::kAllGatherMatmul, Method::kRingExchange, 1, Variant::kAggregate},
    {CollectiveKind::kAllGatherMatmul, Method::kPipeline, 1},
    {CollectiveKind::kAllGatherMatmul, Method::kPipeline, 2},
    {CollectiveKind::kMatmulReduceScatter, Method::kRingExchange, 1},
    {CollectiveKind::kMatmulReduceScatter, Method::kPipeline, 2},
    {CollectiveKind::kMatmulReduceScatter, Method::kPipeline, 1,
     Variant::kOverlapFirstGemm},
    {CollectiveKind::kMatmulAllReduce, Method::kRingExchange, 1},
    {CollectiveKind::kMatmulAllReduce, Method::kRingExchange, 1, Variant::kOneShot},
    {CollectiveKind::kMatmulAllReduce, Method::kPipeline, 2},
    {CollectiveKind::kMatmulAllReduce, Method::kPipeline, 1, Variant::kPlain,
     Reduction::kMulticast},
    {CollectiveKind::kMatmulAllReduce, Method::kPipeline, 2, Variant::kPlain,
     Reduction::kMulticast},
    {CollectiveKind::kAllReduce, Method::kPipeline, 1, Variant::kPlain,
     Reduction::kMulticast},
    {CollectiveKind::kMatmulAllReduce, Method::kRingExchange, 1, Variant::kOneShot,
     Reduction::kOneKernel},
};

inline std::vector<Kind> Kinds(Reduction reduction) {
  std::vector<Kind> kinds(std::begin(kKinds), std::end(kKinds));
  std::erase_if(kinds, [&](const Kind& k) { return k.reduction != reduction; });
  return kinds;
}

// First epochs: where the unsigned value wraps, and where the sign changes.
inline constexpr uint64_t kUnsignedWrap = UINT64_MAX;
inline constexpr uint64_t kSignedWrap = INT64_MAX;

inline ModelCall Make(const Kind& kind, int num_ranks) {
  return {MakeRankSchedules(kind.collective, kind.method, num_ranks, kind.num_splits,
                            kind.variant),
          kind.reduction};
}

inline std::string Describe(const std::vector<Kind>& kinds, int num_ranks) {
  std::string text = "P = " + std::to_string(num_ranks);
  for (const Kind& kind : kinds) {
    text += std::string(", ") + std::string(CollectiveKindName(kind.collective)) +
            " by " + std::string(MethodName(kind.method)) + ", " +
            std::string(VariantName(kind.variant)) + ", in " +
            std::to_string(kind.num_splits) +
            (kind.reduction == Reduction::kMulticast   ? ", multicast"
             : kind.reduction == Reduction::kOneKernel ? ", one kernel"
                                                       : "");
  }
  return text;
}

using Change = std::function<void(RankProgram&)>;

// Returns the error that the search finds in consecutive calls, "" if there is none.
// `change` modifies the program of every rank; the given ranks are misplaced in the
// last call.
inline std::string Explore(const std::vector<Kind>& kinds,
                           int num_ranks,
                           uint64_t first_epoch,
                           Search search,
                           const Change& change = nullptr,
                           const std::vector<bool>& is_misplaced = {}) {
  std::vector<ModelCall> calls;
  for (const Kind& kind : kinds) calls.push_back(Make(kind, num_ranks));
  calls.back().is_misplaced = is_misplaced;
  ProtocolModel model(calls, first_epoch);
  if (change) {
    for (RankProgram& program : model.programs()) change(program);
  }
  return model.Explore(search);
}

inline bool IsKernel(const Operation& operation, std::string_view name) {
  return operation.kernel != nullptr && operation.kernel->name == name;
}

inline bool IsAllReduce(const Operation& operation) {
  return operation.kernel != nullptr &&
         operation.kernel->name.starts_with(kAllReduceKernel);
}

template <typename Params>
Params& ParamsOf(Operation& operation) {
  return *reinterpret_cast<Params*>(operation.params.data());
}

// Moves each signal before the operations on slots that precede it.
inline void SignalBeforeWriting(RankProgram& program) {
  for (size_t i = 1; i < program.lane.size(); ++i) {
    if (!IsKernel(program.lane[i], kSignalKernel)) continue;
    for (size_t at = i; at > 0 && program.lane[at - 1].uses_slots(); --at) {
      std::swap(program.lane[at - 1], program.lane[at]);
    }
  }
}

// Returns the error that the search finds if the ranks' orders are these.
inline std::string ExploreOrders(const std::vector<Kind>& kinds,
                                 const std::vector<std::vector<int>>& orders,
                                 const Change& change = nullptr) {
  std::vector<ModelCall> calls;
  const int num_ranks = static_cast<int>(orders.size());
  for (const Kind& kind : kinds) calls.push_back(Make(kind, num_ranks));
  ProtocolModel model(calls, kUnsignedWrap, orders);
  if (change) {
    for (RankProgram& program : model.programs()) change(program);
  }
  return model.Explore(Search::kOtherOrder);
}

}  // namespace jax_ub
