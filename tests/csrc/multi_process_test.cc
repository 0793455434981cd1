// Tests the results of calls of groups that span several processes, with an engine in
// each process.
#include <chrono>
#include <thread>
#include <vector>

#include "engine/cpu/multi_process_direct.h"
#include "member.h"
#include "scaled_calls.h"

namespace jax_ub {
namespace {

void EveryOp(const std::vector<int>& process_of_rank, const Sizes& sizes) {
  InProcesses(process_of_rank, [&](Member& member) {
    int seed = 0;
    for (int op = 0; op < kNumOps; ++op) {
      for (int method = 0; method < kNumMethods; ++method) {
        CallAttributes like = Spanning(static_cast<Op>(op), static_cast<Method>(method),
                                       process_of_rank.size());
        if (like.op == Op::kMatmul || !HasMethod(like.op, like.method)) continue;
        for (CallAttributes at :
             Variants(like.op, like.method, static_cast<int>(process_of_rank.size()))) {
          at.channel = like.channel;
          CallSite site(at, seed);
          member.CheckRun(site, 7, sizes, ++seed);
        }
      }
    }
  });
}

void EveryOpOfFp8(const std::vector<int>& process_of_rank) {
  InProcesses(process_of_rank, [&](Member& member) {
    const int num_ranks = static_cast<int>(process_of_rank.size());
    int seed = 0;
    for (int op = 0; op < kNumOps; ++op) {
      for (int method = 0; method < kNumMethods; ++method) {
        CallAttributes like = Spanning(static_cast<Op>(op), static_cast<Method>(method),
                                       process_of_rank.size());
        if (InfoOf(like.op).gemm == GemmKind::kNone || like.op == Op::kMatmul) continue;
        if (!HasMethod(like.op, like.method)) continue;
        for (CallAttributes variant : Variants(like.op, like.method, num_ranks)) {
          variant.channel = like.channel;
          ForEachScaling(
              variant, [&](const CallAttributes& at, ScaleKind kind, bool is_crossed) {
                Arrays arrays(++seed);
                CallSite site(at, seed);
                const auto made =
                    MakeScaledCalls(at, kBlockSizes, kind, is_crossed, arrays);
                for (Outcome& outcome : member.Begin(site, 7, made.calls)) {
                  CHECK_EQ(outcome.Wait(), "");
                }
                made.Dequantize(at);
                CHECK_EQ(NumWrong(at, made.wide, member.ranks()), 0);
              });
        }
      }
    }
  });
}

TEST(EveryOpOfFp8OperandsIsExactInTwoProcesses) { EveryOpOfFp8({0, 1}); }
TEST(EveryOpOfFp8OperandsIsExactInThreeProcesses) { EveryOpOfFp8({2, 0, 1}); }
TEST(EveryOpOfFp8OperandsIsExactWithSeveralRanksAProcess) {
  EveryOpOfFp8({0, 1, 0, 1});
}

TEST(EveryOpByEveryMethodIsExactInTwoProcesses) { EveryOp({0, 1}, {}); }
TEST(EveryOpByEveryMethodIsExactInThreeProcesses) { EveryOp({2, 0, 1}, {}); }
TEST(EveryOpByEveryMethodIsExactWithSeveralRanksAProcess) {
  EveryOp({0, 1, 0, 1, 1}, {});
}
TEST(EveryOpByEveryMethodIsExactWithMoreRanksThanAGroupOnGpusHas) {
  std::vector<int> process_of_rank(24);
  for (size_t rank = 0; rank < process_of_rank.size(); ++rank) {
    process_of_rank[rank] = static_cast<int>(rank % 2);
  }
  EveryOp(process_of_rank, {});
}
TEST(LargerCallsAreExact) { EveryOp({1, 0, 1}, {1, 65, 96, 70}); }

TEST(TimedBarriersAndCallsWaitForALateProcess) {
  Bulletin bulletin;
  Processes processes(2, [&](int process) {
    Member member(process, bulletin, {0, 1});
    CallSite site(Spanning(Op::kAllGatherMatmul, Method::kDirect, 2));
    int seed = 0;
    int num_rounds = 0;
    const auto be_late = [&] {
      if (process == 1) std::this_thread::sleep_for(std::chrono::milliseconds(50));
    };
    for (const int num_calls : {0, 1, 20, 3}) {
      for (int i = 0; i < num_calls; ++i) member.CheckRun(site, 7, {}, ++seed);
      be_late();
      if (process == 1) ++bulletin.word();
      CHECK(member.sequencer().BarrierSeconds(5) > 0);
      CHECK_EQ(bulletin.word().load(), ++num_rounds);
      // The results of the next call are wrong if process 0 does not wait.
      be_late();
    }
    CHECK_THROWS(member.sequencer().BarrierSeconds(0), "count is 0");
  });
  for (const std::string& text : processes.Join()) CHECK_EQ(text, "");
}

}  // namespace
}  // namespace jax_ub

CHECK_MAIN()
