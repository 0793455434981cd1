// Verifies schedules by executing them symbolically, on all ranks together.
//
// One execution suffices. Steps wait for epochs, which only grow, so the steps that can
// execute next never depend on timing. A vector clock per rank shows whether the waits
// themselves order two accesses to a slot, or whether they only happened to execute in
// that order. Overwriting a slot whose old contents may still be read is reported in
// both cases.
#pragma once

#include <string>
#include <vector>

#include "schedule/schedule.h"

namespace jax_ub {

// The schedules of all ranks of a call, indexed by rank.
using RankSchedules = std::vector<Schedule>;

RankSchedules MakeRankSchedules(CollectiveKind collective,
                                Method method,
                                int num_ranks,
                                int num_splits,
                                Variant variant = Variant::kPlain);

// Executes the calls one after another on the same slots, without a barrier between
// them. Returns the violations found, at most 20, or an empty vector if the schedules
// are correct:
//   every split is multiplied, copied or reduced exactly once, and after it arrived;
//   every wait receives the put that it expects, and every put is waited for;
//   no slot is overwritten before its release, or used twice in a call;
//   every slot is released, and no rank waits forever.
std::vector<std::string> CheckCalls(const std::vector<RankSchedules>& calls);

// Checks the collective called twice in a row, and before and after every other
// collective, method and variant.
std::vector<std::string> CheckSchedule(CollectiveKind collective,
                                       Method method,
                                       int num_ranks,
                                       int num_splits,
                                       Variant variant = Variant::kPlain);

}  // namespace jax_ub
