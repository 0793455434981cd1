// Proves schedules by executing them symbolically, all ranks together.
//
// One execution is enough: steps wait on epochs that only grow, so what can happen next
// never depends on timing, and a vector clock per rank shows whether two accesses to a
// slot are ordered by the waits themselves or only happened to come in that order. A
// slot that is written while its old contents may still be read is reported in either
// case.
#pragma once

#include <string>
#include <vector>

#include "schedule/schedule.h"

namespace jax_ub {

// One schedule per rank.
using RankSchedules = std::vector<Schedule>;

RankSchedules MakeRankSchedules(CollectiveKind pattern,
                                Method method,
                                int num_ranks,
                                int num_splits,
                                Variant variant = Variant::kPlain);

// Executes the calls in a row on the same slots; no rank waits for another between
// them. Returns what is wrong, at most a few of each kind; empty: proven. That is:
//   every piece is multiplied, copied or reduced exactly once, and after it arrived;
//   every wait meets the put that it means, and every put is waited for;
//   no slot is written before its contents were released, nor used twice in a call;
//   every slot is released, and no rank waits for ever.
std::vector<std::string> CheckCalls(const std::vector<RankSchedules>& calls);

// The same for the collective alone, twice, and before and after every other pattern,
// method and variant.
std::vector<std::string> CheckSchedule(CollectiveKind pattern,
                                       Method method,
                                       int num_ranks,
                                       int num_splits,
                                       Variant variant = Variant::kPlain);

}  // namespace jax_ub
