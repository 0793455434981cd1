// Tests the caches of blockings, slot plans and schedules: a cached plan equals a newly
// made one, whatever the addresses are.
#include <atomic>
#include <string>
#include <thread>
#include <vector>

#include "call_maker.h"
#include "check.h"
#include "engine/cpu/cpu_device.h"
#include "engine/executor.h"
#include "engine_calls.h"
#include "gemm/cpu/blocking.h"
#include "gemm/cpu/isa.h"

namespace jax_ub {
namespace {

using jax_ub_test::Arrays;
using jax_ub_test::MakeCalls;
using jax_ub_test::NumWrong;
using jax_ub_test::Sizes;

// Returns a problem with only the members that a blocking depends on: sizes, and K in
// `num_segments` equal segments of A.
GemmProblem SizesOnly(int64_t m, int64_t n, int64_t k, int64_t num_segments = 1) {
  GemmProblem problem;
  problem.m = m;
  problem.n = n;
  problem.k = k;
  for (int64_t i = 0; i <= num_segments; ++i) {
    problem.a.inner_bounds.push_back(i * k / num_segments);
  }
  problem.b.inner_bounds = {0, k};
  return problem;
}

struct Case {
  GemmProblem problem;
  const KernelSet* kernels;
  int num_workers;

  GemmBlocking Get(BlockingCache& cache) const {
    return cache.Get(problem, *kernels, num_workers);
  }
  bool IsRight(BlockingCache& cache) const {
    return Get(cache) == ChooseBlocking(problem, *kernels, num_workers);
  }
};

// Returns cases that differ from the first one in one parameter that a blocking depends
// on.
std::vector<Case> Cases() {
  const KernelSet* const general = IsaInUse().general;
  // The copy has the same kernels at another address, like the kernels of another
  // instruction set.
  static const KernelSet copy = *general;
  // Segments of 64 elements become blocks of K only if they have their own factors.
  GemmProblem with_factors = SizesOnly(512, 768, 1024, 16);
  with_factors.has_factors_by_k = true;
  // With few rows, the blocks depend on the dtype and the layout of B.
  const GemmProblem few_rows = SizesOnly(16, 768, 1024);
  GemmProblem few_rows_of_bytes = few_rows;
  few_rows_of_bytes.b.dtype = DType::kE4M3;
  GemmProblem few_rows_along_n = few_rows;
  few_rows_along_n.b.segments = {{nullptr, 1, 768}};
  GemmProblem few_rows_of_bytes_along_n = few_rows_of_bytes;
  few_rows_of_bytes_along_n.b.segments = {{nullptr, 1, 768}};
  return {{SizesOnly(512, 768, 1024), general, 2},
          {SizesOnly(520, 768, 1024), general, 2},
          {SizesOnly(512, 776, 1024), general, 2},
          {SizesOnly(512, 768, 1032), general, 2},
          {SizesOnly(512, 768, 1024, 4), general, 2},
          {SizesOnly(512, 768, 1024, 16), general, 2},
          {with_factors, general, 2},
          {few_rows, general, 2},
          {few_rows_of_bytes, general, 2},
          {few_rows_along_n, general, 2},
          {few_rows_of_bytes_along_n, general, 2},
          {SizesOnly(512, 768, 1024), &copy, 2},
          {SizesOnly(512, 768, 1024), general, 16}};
}

TEST(ABlockingIsChosenOnceForEverythingThatItDependsOn) {
  BlockingCache cache;
  for (int repetition = 0; repetition < 3; ++repetition) {
    for (const Case& one : Cases()) CHECK(one.IsRight(cache));
    CHECK_EQ(cache.num_chosen(), static_cast<int64_t>(Cases().size()));
  }
}

TEST(AFullCacheOfBlockingsStartsAnew) {
  BlockingCache cache;
  const Case first = Cases()[0];
  CHECK(first.IsRight(cache));
  const auto most = static_cast<int64_t>(BlockingCache::kMaxEntries);
  for (int64_t i = 0; i < most; ++i) {
    Case other = first;
    other.problem.n = 8 * (1000 + i);
    other.Get(cache);
  }
  CHECK_EQ(cache.num_chosen(), most + 1);
  CHECK(first.IsRight(cache));
  CHECK_EQ(cache.num_chosen(), most + 2);
  CHECK(first.IsRight(cache));
  CHECK_EQ(cache.num_chosen(), most + 2);
}

TEST(ThreadsShareBlockings) {
  BlockingCache cache;
  std::atomic<int> num_wrong{0};
  std::vector<std::thread> threads;
  for (int t = 0; t < 4; ++t) {
    threads.emplace_back([&] {
      for (int repetition = 0; repetition < 50; ++repetition) {
        for (const Case& one : Cases()) num_wrong += !one.IsRight(cache);
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  CHECK_EQ(num_wrong.load(), 0);
  CHECK(cache.num_chosen() <= 4 * static_cast<int64_t>(Cases().size()));
}

void Run(Engine& engine,
         CallSite& site,
         int64_t run_id,
         const std::vector<RankCall>& calls) {
  std::vector<Outcome> outcomes;
  for (size_t rank = 0; rank < calls.size(); ++rank) {
    const int64_t device = 100 + static_cast<int64_t>(rank);
    outcomes.push_back(Submit(engine, site, run_id, device, calls[rank]));
  }
  for (Outcome& outcome : outcomes) CHECK_EQ(outcome.Wait(), "");
}

TEST(CallsAtOtherAddressesChooseNoBlocking) {
  for (Method method : {Method::kDirect, Method::kRingExchange}) {
    Engine& engine = NewEngine();
    const CallAttributes at = MakeAttributes(Op::kAllGatherMatmul, method, 4);
    CallSite site(at);
    const auto num_chosen = [&] { return engine.pool().blockings().num_chosen(); };
    int64_t run_id = 0;
    const auto call = [&] {
      Arrays arrays(static_cast<int>(run_id));
      const auto calls = MakeCalls(at, {1, 12, 48, 40}, arrays);
      Run(engine, site, run_id++, calls);
      CHECK_EQ(NumWrong(at, calls), 0);
    };
    call();
    const int64_t first = num_chosen();
    CHECK(first > 0);
    for (int i = 0; i < 3; ++i) call();
    CHECK_EQ(num_chosen(), first);
    // Such a small product is divided for one worker, whatever the number of threads
    // is.
    engine.pool().set_num_threads(3);
    call();
    CHECK_EQ(num_chosen(), first);
  }
}

TEST(ASlotPlanIsKeptForTheShapesOfItsCallSite) {
  Engine& engine = NewEngine();
  const CpuDevice device(engine.pool());
  const CallAttributes at =
      MakeAttributes(Op::kMatmulReduceScatter, Method::kPipeline, 3);
  SlotPlans plans;
  Arrays arrays(0);
  const RankCall call = MakeCalls(at, {}, arrays)[0];
  const RankCall moved = MakeCalls(at, {}, arrays)[1];
  const RankCall larger = MakeCalls(at, {2, 9, 7, 3}, arrays)[0];
  const SlotRequirements first = plans.Find(at, call, device);
  CHECK(plans.Find(at, moved, device).schedules == first.schedules);
  const SlotRequirements second = plans.Find(at, larger, device);
  CHECK(second.slot_bytes > first.slot_bytes);
  CHECK_EQ(second.slot_bytes, ComputeSlotRequirements(at, larger, device).slot_bytes);
  CHECK_EQ(plans.Find(at, call, device).slot_bytes, first.slot_bytes);
}

TEST(AMethodThatAnOpLacksIsRefusedEveryTime) {
  Engine& engine = NewEngine();
  const CpuDevice device(engine.pool());
  const CallAttributes at = MakeAttributes(Op::kAllGatherMatmul, Method::kBulk, 2);
  SlotPlans plans;
  Arrays arrays(0);
  const RankCall call = MakeCalls(at, {}, arrays)[0];
  for (int i = 0; i < 2; ++i) {
    CHECK_THROWS(plans.Find(at, call, device), "has no method bulk");
  }
}

TEST(RanksShareTheirSchedules) {
  constexpr int kNumRanks = 8;
  const auto make = [](int rank) {
    return MakeSchedule(CollectiveKind::kMatmulAllReduce, Method::kRingExchange, rank,
                        kNumRanks, 3);
  };
  Schedules schedules(make(0));
  std::vector<std::thread> threads;
  std::vector<const Schedule*> found(2 * kNumRanks);
  for (int t = 0; t < 2 * kNumRanks; ++t) {
    threads.emplace_back([&, t] { found[t] = &schedules.Of(t % kNumRanks); });
  }
  for (std::thread& thread : threads) thread.join();
  for (int rank = 0; rank < kNumRanks; ++rank) {
    CHECK(found[rank] == found[rank + kNumRanks]);
    CHECK_EQ(found[rank]->rank, rank);
    CHECK(found[rank]->steps == make(rank).steps);
  }
}

// Several launches of a call site may run at the same time, here even with different
// shapes for two groups of devices.
TEST(LaunchesInFlightShareTheirPlans) {
  for (Op op : {Op::kAllGatherMatmul, Op::kMatmulReduceScatter, Op::kWgrad}) {
    Engine& engine = NewEngine();
    CallAttributes at = MakeAttributes(op, Method::kRingExchange, 3);
    if (op == Op::kWgrad) at.gather = Gather::kX;
    CallAttributes two_groups = at;
    two_groups.ranks = {100, 101, 102, 200, 201, 202};
    CallSite site(two_groups);
    struct Launch {
      Launch(const CallAttributes& at, const Sizes& sizes, int seed)
          : arrays(seed), calls(MakeCalls(at, sizes, arrays)) {}
      Arrays arrays;
      std::vector<RankCall> calls;
    };
    std::vector<std::unique_ptr<Launch>> launches;
    std::vector<Outcome> outcomes;
    for (int launch = 0; launch < 16; ++launch) {
      const Sizes sizes = launch % 3 == 0 ? Sizes{2, 9, 33, 17} : Sizes{};
      launches.push_back(std::make_unique<Launch>(at, sizes, launch));
      const int64_t first_device = launch % 2 == 0 ? 100 : 200;
      for (int rank = 0; rank < at.num_ranks; ++rank) {
        outcomes.push_back(Submit(engine, site, launch, first_device + rank,
                                  launches.back()->calls[rank]));
      }
    }
    for (Outcome& outcome : outcomes) CHECK_EQ(outcome.Wait(), "");
    for (const auto& launch : launches) CHECK_EQ(NumWrong(at, launch->calls), 0);
  }
}

}  // namespace
}  // namespace jax_ub

CHECK_MAIN()
