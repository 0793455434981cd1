// Tests calls of all ranks through the CPU engine: values, matching, and errors if a
// rank does not arrive, disagrees or fails.
#include "engine/cpu/engine.h"

#include <chrono>
#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "call_maker.h"
#include "check.h"
#include "engine/cpu/cpu_device.h"
#include "engine/cpu/slot_pool.h"
#include "engine/executor.h"
#include "engine_calls.h"
#include "gemm/gemm.h"
#include "no_thread_starts.h"

namespace jax_ub {
namespace {

using jax_ub_test::Arrays;
using jax_ub_test::MakeCalls;
using jax_ub_test::NumWrong;
using jax_ub_test::Sizes;

void CheckRun(Engine& engine, const CallAttributes& at, const Sizes& sizes, int seed) {
  Arrays arrays(seed);
  CallSite site(at);
  const std::vector<RankCall> calls = MakeCalls(at, sizes, arrays);
  for (const std::string& text : RunAll(engine, site, seed, calls)) CHECK_EQ(text, "");
  CHECK_EQ(NumWrong(at, calls), 0);
}

TEST(EveryOpByEveryMethodIsExact) {
  Engine& engine = NewEngine();
  int seed = 0;
  for (int num_ranks : {1, 2, 3, 5, 8}) {
    for (int op = 0; op < kNumOps; ++op) {
      for (int method = 0; method < kNumMethods; ++method) {
        for (const CallAttributes& at :
             Variants(static_cast<Op>(op), static_cast<Method>(method), num_ranks)) {
          if (!HasMethod(at.op, at.method)) continue;
          CheckRun(engine, at, {}, ++seed);
        }
      }
    }
  }
}

TEST(MoreRanksThanAGroupOnGpusHasAreExact) {
  Engine& engine = NewEngine();
  for (int num_ranks : {17, 24, 32}) {
    for (int op = 0; op < kNumOps; ++op) {
      for (int method = 0; method < kNumMethods; ++method) {
        const CallAttributes at =
            MakeAttributes(static_cast<Op>(op), static_cast<Method>(method), num_ranks);
        if (HasMethod(at.op, at.method)) CheckRun(engine, at, {}, op);
      }
    }
  }
}

TEST(LargerCallsThatSeveralThreadsComputeAreExact) {
  Engine& engine = NewEngine();
  for (Method method : {Method::kDirect, Method::kRingExchange, Method::kPipeline}) {
    for (Op op : {Op::kAllGatherMatmul, Op::kMatmulReduceScatter}) {
      CheckRun(engine, MakeAttributes(op, method, 4), {1, 65, 96, 70}, 7);
    }
  }
}

TEST(AnAllReduceOfFewerElementsThanRanksIsExact) {
  Engine& engine = NewEngine();
  for (Method method : {Method::kDirect, Method::kRingExchange, Method::kPipeline}) {
    CheckRun(engine, MakeAttributes(Op::kAllReduce, method, 5), {1, 1, 2, 1}, 3);
  }
}

TEST(SlotsAreReusedFromCallToCall) {
  Engine& engine = NewEngine();
  const CallAttributes at =
      MakeAttributes(Op::kAllGatherMatmul, Method::kRingExchange, 3);
  CheckRun(engine, at, {}, 1);
  const int64_t slot_bytes = engine.counters().slot_bytes;
  CHECK(slot_bytes > 0);
  for (int seed = 2; seed < 30; ++seed) CheckRun(engine, at, {}, seed);
  CHECK_EQ(engine.counters().slot_bytes, slot_bytes);
  CHECK_EQ(engine.counters().peak_slot_bytes, slot_bytes);
}

TEST(SlotsOfACallThatDidNotBeginAreNotCounted) {
  SlotPool pool;
  const int64_t size_bytes = pool.Acquire(2, 3, 100)->size_bytes();
  CHECK(size_bytes >= 2 * 3 * 100);
  CHECK_EQ(pool.size_bytes(), 0);
  CHECK_EQ(pool.peak_bytes(), size_bytes);
  pool.Release(pool.Acquire(2, 3, 100));
  CHECK_EQ(pool.size_bytes(), size_bytes);
  pool.ReleaseFree();
  CHECK_EQ(pool.size_bytes(), 0);
}

TEST(ALoopMatchesTheSameExecutionOfEveryRank) {
  Engine& engine = NewEngine();
  constexpr int kNumRounds = 20;
  const CallAttributes at = MakeAttributes(Op::kAllReduce, Method::kDirect, 2);
  CallSite site(at);
  Arrays arrays(1);
  std::vector<std::vector<RankCall>> rounds;
  for (int i = 0; i < kNumRounds; ++i) rounds.push_back(MakeCalls(at, {}, arrays));
  // Rank 0 submits the calls of all rounds before rank 1 submits the first.
  std::vector<Outcome> outcomes;
  for (int rank = 0; rank < 2; ++rank) {
    for (const auto& calls : rounds) {
      outcomes.push_back(Submit(engine, site, 5, 100 + rank, calls[rank]));
    }
  }
  for (Outcome& outcome : outcomes) CHECK_EQ(outcome.Wait(), "");
  for (const auto& calls : rounds) CHECK_EQ(NumWrong(at, calls), 0);
}

TEST(CallSitesAndRunsAndGroupsDoNotMix) {
  Engine& engine = NewEngine();
  CallAttributes at = MakeAttributes(Op::kAllReduce, Method::kDirect, 2);
  at.ranks = {100, 101, 200, 201};
  CallSite one(at);
  CallSite other(at);
  struct Case {
    CallSite& site;
    int64_t run_id;
    int64_t first_device;
  };
  const std::vector<Case> cases = {
      {one, 1, 100}, {other, 1, 100}, {one, 2, 100}, {one, 1, 200}};
  Arrays arrays(1);
  std::vector<std::vector<RankCall>> calls;
  std::vector<Outcome> outcomes;
  for (size_t i = 0; i < cases.size(); ++i) calls.push_back(MakeCalls(at, {}, arrays));
  for (int rank = 0; rank < 2; ++rank) {
    for (size_t i = 0; i < cases.size(); ++i) {
      outcomes.push_back(Submit(engine, cases[i].site, cases[i].run_id,
                                cases[i].first_device + rank, calls[i][rank]));
    }
  }
  for (Outcome& outcome : outcomes) CHECK_EQ(outcome.Wait(), "");
  for (const auto& group : calls) CHECK_EQ(NumWrong(at, group), 0);
}

TEST(AMissingRankEndsTheOthersAtTheDeadline) {
  Engine& engine = NewEngine(1);  // for two ranks to come, on a busy machine
  CallSite site(MakeAttributes(Op::kAllReduce, Method::kDirect, 3));
  Arrays arrays(1);
  const auto calls = MakeCalls(site.attributes(), {}, arrays);
  const auto begin = std::chrono::steady_clock::now();
  Outcome first = Submit(engine, site, 1, 100, calls[0]);
  Outcome third = Submit(engine, site, 1, 102, calls[2]);
  const std::string text = first.Wait();
  CHECK_EQ(third.Wait(), text);
  const std::chrono::duration<double> elapsed_s =
      std::chrono::steady_clock::now() - begin;
  CHECK(elapsed_s.count() >= 1);
  CHECK(
      text.starts_with("CommunicatorError: jax_ub.all_reduce (ub_name 'test'): op "
                       "all_reduce of group 0 waited 1 s for rank(s) 1 of 3; "
                       "waiting: rank(s) 0, 2 (run 1, execution 0)"));
  CHECK(text.find("wait for one of XLA's threads: set NPROC") != std::string::npos);
  // The late call fails at once, and accesses no memory.
  CHECK_EQ(Submit(engine, site, 1, 101, calls[1]).Wait(), text);
  CHECK_EQ(engine.counters().failed_calls > 0, true);
  // Other calls of that run and group fail, too; other groups and the next run do not.
  CallSite next(MakeAttributes(Op::kAllGather, Method::kBulk, 3));
  CHECK_EQ(Submit(engine, next, 1, 100, calls[0]).Wait().empty(), false);
  engine.rendezvous().set_timeout_s(kLongS);
  for (const std::string& outcome : RunAll(engine, site, 2, calls)) {
    CHECK_EQ(outcome, "");
  }
  CHECK_EQ(NumWrong(site.attributes(), calls), 0);
}

TEST(ACallThatNothingCouldEndAtItsDeadlineIsRefused) {
  Engine& engine = NewEngine(0.2);
  const CallAttributes at = MakeAttributes(Op::kMatmulAllReduce, Method::kDirect, 2);
  CallSite site(at);
  Arrays arrays(8);
  const std::vector<RankCall> calls = MakeCalls(at, Sizes{}, arrays);
  {
    const NoThreadStarts limit;  // the watchdog neither
    for (int rank = 0; rank < 2; ++rank) {
      const std::string text = Submit(engine, site, 1, 100 + rank, calls[rank]).Wait();
      CHECK(text.find("limit of threads") != std::string::npos);
    }
  }
  const std::string text = Submit(engine, site, 2, 100, calls[0]).Wait();
  CHECK(text.find("waited 0.2 s for rank(s) 1") != std::string::npos);
  engine.rendezvous().set_timeout_s(kLongS);
  for (const std::string& end : RunAll(engine, site, 3, calls)) CHECK_EQ(end, "");
}

// There is one thread, so ranks cannot wait for each other in sequence.
TEST(AtTheLimitOfThreadsTheErrorNamesTheLimit) {
  for (Op op : {Op::kAllGatherMatmul, Op::kBulkReduceScatter}) {
    Engine& engine = NewEngine(1);
    CallSite site(MakeAttributes(op, Method::kRingExchange, 3));
    Arrays arrays(4);
    const std::vector<RankCall> calls = MakeCalls(site.attributes(), {}, arrays);
    std::vector<Outcome> outcomes = {Submit(engine, site, 1, 100, calls[0])};
    {
      const NoThreadStarts limit;  // the watchdog has started
      for (int rank = 1; rank < 3; ++rank) {
        outcomes.push_back(Submit(engine, site, 1, 100 + rank, calls[rank]));
      }
      const std::string text = outcomes[0].Wait();
      CHECK(text.find(" waited 1 s for chunk ") != std::string::npos);
      CHECK(
          text.ends_with("Only 1 of 3 ranks found a thread: is the limit of threads "
                         "reached (ulimit -u, or pids.max of the container)?"));
      CHECK_EQ(outcomes[1].Wait(), text);
      outcomes[2].Wait();  // it has all that it needs of the others
      // Method direct runs jobs, which do not wait for anything.
      CallSite direct(MakeAttributes(op, Method::kDirect, 3));
      for (int rank = 0; rank < 3; ++rank) {
        outcomes[rank] = Submit(engine, direct, 3, 100 + rank, calls[rank]);
      }
      for (Outcome& outcome : outcomes) CHECK_EQ(outcome.Wait(), "");
      CHECK_EQ(NumWrong(direct.attributes(), calls), 0);
    }
    CHECK_EQ(engine.counters().slot_bytes, 0);
    engine.rendezvous().set_timeout_s(kLongS);
    for (const std::string& end : RunAll(engine, site, 2, calls)) CHECK_EQ(end, "");
    CHECK_EQ(NumWrong(site.attributes(), calls), 0);
  }
}

TEST(AFailureEndsWhatItsGroupHasPendingInThatRun) {
  Engine& engine = NewEngine();
  CallSite site(MakeAttributes(Op::kAllReduce, Method::kDirect, 2));
  CallSite other(MakeAttributes(Op::kAllReduce, Method::kDirect, 2));
  Arrays arrays(1);
  auto calls = MakeCalls(site.attributes(), {}, arrays);
  Outcome pending = Submit(engine, other, 1, 100, calls[0]);
  Outcome next_run = Submit(engine, other, 2, 100, calls[0]);
  Outcome first = Submit(engine, site, 1, 100, calls[0]);
  CHECK(pending.IsPending());
  RankCall wrong = calls[1];
  wrong.results[0] = arrays.Empty(1, 1, 1);
  const std::string text = Submit(engine, site, 1, 101, wrong).Wait();
  CHECK(text.find("the communicated result is f32[1, 1], expected f32[35, 1]") !=
        std::string::npos);
  CHECK_EQ(first.Wait(), text);
  CHECK_EQ(pending.Wait(), text);
  CHECK(next_run.IsPending());
  CHECK_EQ(Submit(engine, other, 2, 101, calls[1]).Wait(), "");
  CHECK_EQ(next_run.Wait(), "");
}

TEST(AFailureThatIsRepeatedLeavesTheOthersKnown) {
  Engine& engine = NewEngine(0.5);
  CallSite site(MakeAttributes(Op::kAllReduce, Method::kDirect, 2));
  Arrays arrays(1);
  const auto calls = MakeCalls(site.attributes(), {}, arrays);
  RankCall wrong = calls[1];
  wrong.results[0] = arrays.Empty(1, 1, 1);
  const std::string text = Submit(engine, site, 1, 101, wrong).Wait();
  for (int i = 0; i < 100; ++i) Submit(engine, site, 2, 101, wrong);
  CHECK_EQ(Submit(engine, site, 1, 100, calls[0]).Wait(), text);
}

TEST(EveryGroupThatFailedInARunIsKnown) {
  Engine& engine = NewEngine(0.5);
  CallAttributes at = MakeAttributes(Op::kAllReduce, Method::kDirect, 2);
  constexpr int kNumGroups = 300;
  at.ranks.clear();
  for (int64_t device = 0; device < 2 * kNumGroups; ++device) {
    at.ranks.push_back(device);
  }
  CallSite site(at);
  Arrays arrays(1);
  const auto calls = MakeCalls(at, {}, arrays);
  RankCall wrong = calls[1];
  wrong.results[0] = arrays.Empty(1, 1, 1);
  std::string text;
  for (int group = 0; group < kNumGroups; ++group) {
    text = Submit(engine, site, 1, 2 * group + 1, wrong).Wait();
  }
  for (int group = 0; group < kNumGroups; ++group) {
    CHECK_EQ(Submit(engine, site, 1, 2 * group, calls[0]).Wait(), text);
  }
}

TEST(RanksThatDisagreeAllNameBothCalls) {
  Engine& engine = NewEngine();
  CallSite site(MakeAttributes(Op::kAllReduce, Method::kDirect, 2));
  Arrays arrays(1);
  auto calls = MakeCalls(site.attributes(), {}, arrays);
  calls[1] = MakeCalls(site.attributes(), {2, 6, 7, 3}, arrays)[1];
  for (const std::string& text : RunAll(engine, site, 1, calls)) {
    CHECK_EQ(text,
             "CommunicatorError: jax_ub.all_reduce (ub_name 'test'): ranks 0 and 1 do "
             "not agree: operand 0 is f32[35, 1] and f32[42, 1], respectively");
  }
}

TEST(AMethodThatAnOpLacksIsRejectedOnEveryRank) {
  Engine& engine = NewEngine();
  CallSite site(MakeAttributes(Op::kAllGatherMatmul, Method::kBulk, 2));
  Arrays arrays(1);
  for (const std::string& text :
       RunAll(engine, site, 1, MakeCalls(site.attributes(), {}, arrays))) {
    CHECK(text.find("all_gather_matmul has no method bulk: use direct") !=
          std::string::npos);
  }
}

TEST(ADeviceOutsideTheMeshIsRefused) {
  CallSite site(MakeAttributes(Op::kAllReduce, Method::kDirect, 2));
  Arrays arrays(1);
  const auto calls = MakeCalls(site.attributes(), {}, arrays);
  CHECK(Submit(NewEngine(), site, 1, 7, calls[0])
            .Wait()
            .find("device 7 is not among the devices") != std::string::npos);
}

TEST(AttributesThatNoOpHasAreRefused) {
  const auto make = [](const std::function<void(CallAttributes&)>& change) {
    CallAttributes at = MakeAttributes(Op::kAllReduce, Method::kDirect, 2);
    change(at);
    CallSite site(at);
  };
  CHECK_THROWS(make([](CallAttributes& at) { at.num_ranks = 0; }), "num_ranks is 0");
  CHECK_THROWS(make([](CallAttributes& at) { at.num_ranks = 3; }),
               "no multiple of num_ranks");
  CHECK_THROWS(make([](CallAttributes& at) { at.ranks[1] = 100; }), "device 100 twice");
  CHECK_THROWS(make([](CallAttributes& at) { at.ranks.clear(); }),
               "a local op has num_ranks");
  CHECK_THROWS(make([](CallAttributes& at) { at.num_kernels = 0; }),
               "num_kernels is 0");
  CHECK_THROWS(make([](CallAttributes& at) { at.num_splits = -1; }),
               "num_splits is -1");
  CHECK_THROWS(make([](CallAttributes& at) { at.has_row_scales = true; }),
               "has_row_scales without has_scales");
}

TEST(WrongShapesAreRefusedWithTheNumbers) {
  struct Case {
    Op op;
    std::function<void(RankCall&, Arrays&)> change;
    const char* text;
  };
  const std::vector<Case> cases = {
      {Op::kAllGatherMatmul,
       [](RankCall& call, Arrays& a) { call.operands[1] = a.New(1, 8, 3); },
       "w is f32[8, 3], expected f32[7, 3]"},
      {Op::kAllGatherMatmul,
       [](RankCall& call, Arrays& a) { call.results[0] = a.Empty(2, 5, 3); },
       "y is f32[2, 5, 3], expected f32[2, 10, 3]"},
      {Op::kAllGatherMatmul,
       [](RankCall& call, Arrays& a) { call.operands.pop_back(); },
       "takes 2 operands and 1 results, got 1 and 1"},
      {Op::kAllGatherMatmul,
       [](RankCall& call, Arrays& a) { call.operands[1].dtype = DType::kBF16; },
       "w is bf16[7, 3], expected f32[7, 3]"},
      {Op::kMatmulReduceScatter,
       [](RankCall& call, Arrays& a) { call.operands[0] = a.New(2, 9, 7); },
       "x has 9 rows, which num_ranks = 2 does not divide"},
      {Op::kWgrad, [](RankCall& call, Arrays& a) { call.operands[0] = a.New(2, 0, 7); },
       "x is f32[2, 0, 7], expected f32[2, 0, 7], not empty"},
      {Op::kAllGather,
       [](RankCall& call, Arrays& a) { call.results[0].dtype = DType::kF16; },
       "the gathered result is f16[2, 10, 7], expected f32[2, 10, 7]"},
      {Op::kReduceScatter,
       [](RankCall& call, Arrays& a) { call.operands[0] = a.New(2, 11, 7); },
       "the operand has 11 rows"},
  };
  for (const Case& one : cases) {
    const CallAttributes at = MakeAttributes(one.op, Method::kDirect, 2);
    Arrays arrays(1);
    RankCall call = MakeCalls(at, {}, arrays)[0];
    CheckCall(at, call);
    one.change(call, arrays);
    CHECK_THROWS(CheckCall(at, call), one.text);
  }
}

TEST(WrongAddendsOfAnAllReduceAreRefusedWithTheNumbers) {
  CallAttributes at = MakeAttributes(Op::kAllReduce, Method::kDirect, 2);
  at.has_bias = at.has_residual = true;
  Arrays arrays(1);
  const RankCall call = MakeCalls(at, {}, arrays)[0];
  CheckCall(at, call);
  const auto refuse = [&](size_t operand, const Tensor& tensor, const char* text) {
    RankCall wrong = call;
    wrong.operands[operand] = tensor;
    CHECK_THROWS(CheckCall(at, wrong), text);
  };
  refuse(1, arrays.New(1, 1, 6), "bias is f32[1, 6], expected f32[1, 7]");
  refuse(2, arrays.New(1, 9, 7), "residual is f32[9, 7], expected f32[10, 7]");
  at.has_residual = false;
  CHECK_THROWS(CheckCall(at, call), "takes 2 operands and 1 results, got 3 and 1");
}

// Returns the errors of ranks 0 and 1 of three if rank 2 never begins its call; rank 0
// waits for 0.1 s.
std::vector<std::string> TextsWithoutRank2(const CallAttributes& at) {
  Engine& engine = NewEngine();
  Arrays arrays(1);
  const auto calls = MakeCalls(at, {}, arrays);
  const SlotRequirements plan =
      ComputeSlotRequirements(at, calls[0], CpuDevice(engine.pool()));
  InProcessCommunicator communicator(at.num_ranks, plan.num_slots, plan.slot_bytes);
  std::vector<std::string> texts(2);
  std::vector<std::thread> threads;
  for (int rank = 0; rank < 2; ++rank) {
    threads.emplace_back([&, rank] {
      try {
        CpuDevice device(engine.pool());
        ExecuteRank(at, calls[rank], plan, rank == 0 ? 1 : kLongS,
                    communicator.rank(rank), device, {});
      } catch (const std::exception& error) {
        texts[rank] = error.what();
        communicator.Poison(std::current_exception());
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  return texts;
}

TEST(ALostPutEndsEveryRankOfAScheduleWithTheReason) {
  CallAttributes at = MakeAttributes(Op::kAllGatherMatmul, Method::kRingExchange, 3);
  std::vector<std::string> texts = TextsWithoutRank2(at);
  CHECK(texts[0].find("rank 0 waited 1 s for chunk 2 of rank 2") != std::string::npos);
  CHECK_EQ(texts[1], texts[0]);
  at = MakeAttributes(Op::kAllReduce, Method::kRingExchange, 3);
  at.variant = Variant::kOneShot;
  texts = TextsWithoutRank2(at);
  CHECK(texts[0].find("rank 0 waited 1 s for all rows of rank 2") != std::string::npos);
}

TEST(ManyIndependentCallsFromFewThreadsEnd) {
  Engine& engine = NewEngine();
  constexpr int kNumSites = 64;
  const CallAttributes at = MakeAttributes(Op::kAllReduce, Method::kDirect, 2);
  std::vector<std::unique_ptr<CallSite>> sites;
  Arrays arrays(1);
  std::vector<std::vector<RankCall>> calls;
  for (int i = 0; i < kNumSites; ++i) {
    sites.push_back(std::make_unique<CallSite>(at));
    calls.push_back(MakeCalls(at, {}, arrays));
  }
  std::vector<Outcome> outcomes(2 * kNumSites);
  std::vector<std::thread> threads;
  for (int rank = 0; rank < 2; ++rank) {
    threads.emplace_back([&, rank] {
      for (int i = 0; i < kNumSites; ++i) {
        const int site = rank == 0 ? i : kNumSites - 1 - i;
        outcomes[2 * site + rank] =
            Submit(engine, *sites[site], 1, 100 + rank, calls[site][rank]);
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  for (Outcome& outcome : outcomes) CHECK_EQ(outcome.Wait(), "");
  for (const auto& group : calls) CHECK_EQ(NumWrong(at, group), 0);
}

}  // namespace
}  // namespace jax_ub

CHECK_MAIN()
