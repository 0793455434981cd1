// Calls of groups whose ranks lie in several processes, through an engine in each.
#include <algorithm>
#include <string>
#include <vector>

#include "check.h"
#include "engine_calls.h"
#include "member.h"
#include "processes.h"

namespace jax_ub {
namespace {

using jax_ub_test::Sizes;

// Runs `function(member)` in every process.
template <typename Function>
void InProcesses(const std::vector<int>& process_of_rank,
                 const Function& function,
                 double timeout_s = kLongS,
                 int64_t half_bytes = 1 << 20) {
  Bulletin bulletin;
  const int num_processes =
      *std::max_element(process_of_rank.begin(), process_of_rank.end()) + 1;
  Processes processes(num_processes, [&](int process) {
    Member member(process, bulletin, process_of_rank, timeout_s, half_bytes);
    function(member);
  });
  for (const std::string& text : processes.Join(60)) CHECK_EQ(text, "");
}

void EveryOp(const std::vector<int>& process_of_rank, const Sizes& sizes) {
  InProcesses(process_of_rank, [&](Member& member) {
    int seed = 0;
    for (int op = 0; op < kNumOps; ++op) {
      for (int method = 0; method < kNumMethods; ++method) {
        Attributes like = Spanning(static_cast<Op>(op), static_cast<Method>(method),
                                   process_of_rank.size());
        if (like.op == Op::kMatmul || !HasMethod(like.op, like.method)) continue;
        for (Attributes at :
             Variants(like.op, like.method, static_cast<int>(process_of_rank.size()))) {
          at.channel = like.channel;
          CallSite site(at, seed);
          member.CheckRun(site, 7, sizes, ++seed);
        }
      }
    }
  });
}

TEST(EveryOpByEveryMethodIsExactInTwoProcesses) { EveryOp({0, 1}, {}); }
TEST(EveryOpByEveryMethodIsExactInThreeProcesses) { EveryOp({2, 0, 1}, {}); }
TEST(EveryOpByEveryMethodIsExactWithSeveralRanksAProcess) {
  EveryOp({0, 1, 0, 1, 1}, {});
}
TEST(LargerCallsAreExact) { EveryOp({1, 0, 1}, {1, 65, 96, 70}); }

}  // namespace
}  // namespace jax_ub

CHECK_MAIN()
