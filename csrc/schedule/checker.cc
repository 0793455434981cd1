#include "schedule/checker.h"

#include <algorithm>
#include <set>
#include <sstream>

#include "schedule/symbolic_execution.h"

namespace jax_ub {

namespace {

constexpr size_t kMaxViolations = 20;

// Returns orders of the ranks in which a wrong schedule is likely to fail.
std::vector<std::vector<int>> AdversarialOrders(int num_ranks) {
  std::vector<int> up(num_ranks);
  for (int r = 0; r < num_ranks; ++r) up[r] = r;
  std::vector<int> down(up.rbegin(), up.rend());
  std::vector<int> odd_first;
  for (int r = 1; r < num_ranks; r += 2) odd_first.push_back(r);
  for (int r = 0; r < num_ranks; r += 2) odd_first.push_back(r);
  return {up, down, odd_first};
}

std::vector<RankSchedules> EveryCollective(int num_ranks, int num_splits) {
  std::vector<RankSchedules> every;
  ForEachSchedule(
      num_ranks, [&](CollectiveKind collective, Method method, Variant variant) {
        every.push_back(
            MakeRankSchedules(collective, method, num_ranks, num_splits, variant));
      });
  return every;
}

}  // namespace

RankSchedules MakeRankSchedules(CollectiveKind collective,
                                Method method,
                                int num_ranks,
                                int num_splits,
                                Variant variant) {
  RankSchedules ranks;
  for (int r = 0; r < num_ranks; ++r) {
    ranks.push_back(
        MakeSchedule(collective, method, r, num_ranks, num_splits, variant));
  }
  return ranks;
}

std::vector<std::string> CheckCalls(const std::vector<RankSchedules>& calls) {
  std::vector<std::string> violations;
  std::set<std::string> seen;
  const int num_ranks = static_cast<int>(calls.at(0).size());
  for (const std::vector<int>& order : AdversarialOrders(num_ranks)) {
    for (bool greedy : {false, true}) {
      SymbolicExecution simulation(calls);
      simulation.Run(order, greedy);
      for (const std::string& violation : simulation.violations()) {
        if (violations.size() < kMaxViolations && seen.insert(violation).second) {
          violations.push_back(violation);
        }
      }
    }
  }
  return violations;
}

std::vector<std::string> CheckSchedule(CollectiveKind collective,
                                       Method method,
                                       int num_ranks,
                                       int num_splits,
                                       Variant variant) {
  const RankSchedules self =
      MakeRankSchedules(collective, method, num_ranks, num_splits, variant);
  std::vector<std::string> violations = CheckCalls({self, self});
  for (const RankSchedules& other : EveryCollective(num_ranks, num_splits)) {
    if (!violations.empty()) break;
    violations = CheckCalls({self, other, self});
  }
  return violations;
}

}  // namespace jax_ub
