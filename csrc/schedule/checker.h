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

// The schedules of one call, indexed by rank.
using RankSchedules = std::vector<Schedule>;

RankSchedules MakeRankSchedules(CollectiveKind collective,
                                Method method,
                                int num_ranks,
                                int num_splits,
                                Variant variant = Variant::kPlain);

// Executes calls one after another on the same slots, without a barrier between them.
// Returns at most 20 violations of these rules:
//
// - Every split is multiplied, copied or reduced once, after it has arrived.
// - Every wait gets the put that it expects, and every put is waited for.
// - No slot is overwritten before its release, or used twice in a call.
// - Every slot is released, and no rank waits forever.
std::vector<std::string> CheckCalls(const std::vector<RankSchedules>& calls);

// Checks a schedule in several sequences of calls. In the first sequence, the call runs
// twice. In the others, it runs before and after a call of each collective, method and
// variant. Returns the violations as CheckCalls does.
std::vector<std::string> CheckSchedule(CollectiveKind collective,
                                       Method method,
                                       int num_ranks,
                                       int num_splits,
                                       Variant variant = Variant::kPlain);

}  // namespace jax_ub
