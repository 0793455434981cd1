#include "schedule/checker.h"

#include <numeric>
#include <set>

#include "schedule/symbolic_execution.h"

namespace jax_ub {

namespace {

constexpr size_t kMaxViolations = 20;

// Returns three orders in which the ranks take turns: ascending, descending, and odd
// ranks first. A wrong schedule is likely to fail in one of them.
std::vector<std::vector<int>> AdversarialOrders(int num_ranks) {
  std::vector<int> up(num_ranks);
  std::iota(up.begin(), up.end(), 0);
  std::vector<int> down(up.rbegin(), up.rend());
  std::vector<int> odd_first;
  for (int r = 1; r < num_ranks; r += 2) odd_first.push_back(r);
  for (int r = 0; r < num_ranks; r += 2) odd_first.push_back(r);
  return {up, down, odd_first};
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
  ForEachSchedule(num_ranks, [&](CollectiveKind c, Method m, Variant v) {
    if (!violations.empty()) return;
    violations =
        CheckCalls({self, MakeRankSchedules(c, m, num_ranks, num_splits, v), self});
  });
  return violations;
}

}  // namespace jax_ub
