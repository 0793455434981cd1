// Proves schedules for all ranks together, and tests that the checker detects planted
// defects.
#include "schedule/schedule.h"

#include <algorithm>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "check.h"
#include "schedule/checker.h"

namespace jax_ub {
namespace {

constexpr int kMaxRanks = 16;

std::string FirstOf(const std::vector<std::string>& violations) {
  return violations.empty() ? "" : violations.front();
}

TEST(EveryScheduleIsProvenForOneToSixteenRanks) {
  for (int num_ranks = 1; num_ranks <= kMaxRanks; ++num_ranks) {
    const int num_splits = 1 + num_ranks % 3;
    ForEachSchedule(num_ranks, [&](CollectiveKind collective, Method method,
                                   Variant variant) {
      CHECK_EQ(
          FirstOf(CheckSchedule(collective, method, num_ranks, num_splits, variant)),
          "");
    });
  }
}

// Proves each schedule only after a call of the same kind: all pairs of schedules would
// take minutes.
TEST(EveryScheduleIsProvenForUpToThirtyTwoRanksTwiceInARow) {
  for (int num_ranks = kMaxRanks + 1; num_ranks <= 32; ++num_ranks) {
    const int num_splits = 1 + num_ranks % 3;
    ForEachSchedule(
        num_ranks, [&](CollectiveKind collective, Method method, Variant variant) {
          const RankSchedules ranks =
              MakeRankSchedules(collective, method, num_ranks, num_splits, variant);
          CHECK_EQ(FirstOf(CheckCalls({ranks, ranks})), "");
        });
  }
}

TEST(EveryNumberOfSplitsIsProven) {
  for (int num_splits = 1; num_splits <= 9; ++num_splits) {
    for (CollectiveKind collective :
         {CollectiveKind::kAllGatherMatmul, CollectiveKind::kMatmulReduceScatter,
          CollectiveKind::kMatmulAllReduce}) {
      CHECK_EQ(FirstOf(CheckSchedule(collective, Method::kPipeline, 5, num_splits)),
               "");
    }
  }
}

TEST(ARingBeginsWithTheLocalChunkAndSendsToNeighborsOnly) {
  for (int rank = 0; rank < 4; ++rank) {
    const Schedule schedule = MakeSchedule(CollectiveKind::kAllGatherMatmul,
                                           Method::kRingExchange, rank, 4, 1);
    std::vector<int> chunks;
    for (const Step& step : schedule.steps) {
      if (step.kind == StepKind::kMultiply) chunks.push_back(step.chunk);
      if (step.kind == StepKind::kPut) CHECK_EQ(step.peer, (rank + 1) % 4);
      if (step.kind == StepKind::kWait) CHECK_EQ(step.peer, (rank + 3) % 4);
    }
    CHECK(chunks ==
          std::vector<int>({rank, (rank + 3) % 4, (rank + 2) % 4, (rank + 1) % 4}));
  }
}

TEST(ARingOfPairsMultipliesTwoChunksAfterTheLocalPair) {
  for (int rank = 0; rank < 6; ++rank) {
    const Schedule schedule =
        MakeSchedule(CollectiveKind::kAllGatherMatmul, Method::kRingExchange, rank, 6,
                     1, Variant::kAggregate);
    std::vector<std::pair<int, int>> products;
    int num_puts = 0;
    for (const Step& step : schedule.steps) {
      if (step.kind == StepKind::kMultiply) {
        products.emplace_back(step.chunk, step.num_chunks);
      }
      if (step.kind != StepKind::kPut) continue;
      CHECK_EQ(step.peer, num_puts++ == 0 ? rank ^ 1 : (rank + 2) % 6);
    }
    CHECK_EQ(num_puts, 5);
    const int even = rank - rank % 2;
    CHECK(products ==
          (std::vector<std::pair<int, int>>{
              {rank, 1}, {rank ^ 1, 1}, {(even + 4) % 6, 2}, {(even + 2) % 6, 2}}));
  }
}

TEST(AReduceScatterEndsWithTheLocalChunk) {
  const Schedule schedule = MakeSchedule(CollectiveKind::kMatmulReduceScatter,
                                         Method::kRingExchange, 1, 4, 1);
  std::vector<int> chunks;
  for (const Step& step : schedule.steps) {
    if (step.kind == StepKind::kMultiply) chunks.push_back(step.chunk);
  }
  CHECK(chunks == std::vector<int>({2, 3, 0, 1}));
}

// Returns the chunks of all products ("x1") and puts (">1"), in order.
std::string ProductsAndPuts(const Schedule& schedule) {
  std::string text;
  for (const Step& step : schedule.steps) {
    const bool puts = step.kind == StepKind::kPut;
    if (!puts && step.kind != StepKind::kMultiply) continue;
    text += (puts ? '>' : 'x') + std::to_string(step.chunk) + ' ';
  }
  return text;
}

TEST(OverlapFirstGemmPutsAfterTheNextProduct) {
  const auto order = [](Variant variant) {
    return ProductsAndPuts(MakeSchedule(CollectiveKind::kMatmulReduceScatter,
                                        Method::kPipeline, 0, 3, 2, variant));
  };
  CHECK_EQ(order(Variant::kPlain), "x1 >1 x2 >2 x0 x1 >1 x2 >2 x0 ");
  CHECK_EQ(order(Variant::kOverlapFirstGemm), "x1 x2 >1 x0 >2 x1 x2 >1 x0 >2 ");
}

TEST(OneShotSendsAllRowsToAllAndReducesOnce) {
  for (int num_ranks = 2; num_ranks <= kMaxRanks; ++num_ranks) {
    const Schedule schedule =
        MakeSchedule(CollectiveKind::kMatmulAllReduce, Method::kRingExchange, 0,
                     num_ranks, 1, Variant::kOneShot);
    std::map<StepKind, int> count;
    for (const Step& step : schedule.steps) {
      ++count[step.kind];
      CHECK_EQ(step.chunk, kAllChunks);
    }
    CHECK_EQ(count[StepKind::kPut], num_ranks - 1);
    CHECK_EQ(count[StepKind::kWait], num_ranks - 1);
    CHECK_EQ(count[StepKind::kReduce], 1);
    CHECK_EQ(count[StepKind::kMultiply], 1);
  }
}

TEST(OneRankSendsNothing) {
  ForEachSchedule(1, [](CollectiveKind collective, Method method, Variant variant) {
    const Schedule schedule = MakeSchedule(collective, method, 0, 1, 2, variant);
    CHECK_EQ(schedule.num_slots, 0);
    for (const Step& step : schedule.steps) CHECK_EQ(step.peer, kNone);
  });
}

TEST(SplitsCoverAllRowsOnce) {
  for (int64_t num_rows : {0, 1, 7, 64, 1000}) {
    for (int num_ranks : {1, 3, 16}) {
      for (int num_splits : {1, 4, 9}) {
        int64_t next = 0;
        for (int chunk = 0; chunk < num_ranks; ++chunk) {
          for (int split = 0; split < num_splits; ++split) {
            const RowRange rows =
                SplitRows(num_rows, num_ranks, num_splits, chunk, split);
            CHECK_EQ(rows.begin, next);
            CHECK(rows.end >= rows.begin);
            next = rows.end;
          }
        }
        CHECK_EQ(next, num_rows);
      }
    }
  }
}

TEST(WrongNumbersAreRefused) {
  const auto make = [](Method method, int rank, int num_ranks, int num_splits) {
    MakeSchedule(CollectiveKind::kAllGatherMatmul, method, rank, num_ranks, num_splits);
  };
  CHECK_THROWS(make(Method::kBulk, 0, 2, 1), "all_gather_matmul has no method bulk");
  CHECK_THROWS(make(Method::kPipeline, 2, 2, 1), "rank 2 is none of 2");
  CHECK_THROWS(make(Method::kPipeline, 0, 0, 1), "num_ranks is 0");
  CHECK_THROWS(make(Method::kPipeline, 0, 2, 0), "num_splits is 0");
  CHECK_THROWS(
      MakeSchedule(CollectiveKind::kAllGatherMatmul, Method::kRingExchange, 0, 3, 1,
                   Variant::kAggregate),
      "all_gather_matmul by ring_exchange of 3 ranks has no variant aggregate");
}

constexpr int kNumBroken = 4;

// Removes, changes or repeats one step of one rank, which the checker must detect.
using Mutation = void (*)(std::vector<Step>& steps, size_t step);

void Drop(std::vector<Step>& steps, size_t step) { steps.erase(steps.begin() + step); }
void Repeat(std::vector<Step>& steps, size_t step) {
  steps.insert(steps.begin() + step, steps[step]);
}

// Plants the defect in every step of `kind`, one at a time; returns the number of
// defects that the checker does not detect.
int Unnoticed(const RankSchedules& sound, StepKind kind, Mutation mutation) {
  // It releases its slots after its last put, so no message implies the release.
  const RankSchedules before = MakeRankSchedules(CollectiveKind::kReduceScatter,
                                                 Method::kPipeline, kNumBroken, 2);
  int unnoticed = 0;
  for (size_t rank = 0; rank < sound.size(); ++rank) {
    for (size_t step = 0; step < sound[rank].steps.size(); ++step) {
      if (sound[rank].steps[step].kind != kind) continue;
      // A peer from which the rank has received in this call has released the slots of
      // the previous call.
      const auto& steps = sound[rank].steps;
      const auto is_from_peer = [&](const Step& other) {
        return other.kind == StepKind::kWait && other.peer == steps[step].peer;
      };
      if (kind == StepKind::kWaitFree &&
          std::any_of(steps.begin(), steps.begin() + step, is_from_peer)) {
        continue;
      }
      RankSchedules broken = sound;
      mutation(broken[rank].steps, step);
      if (CheckCalls({before, broken, broken}).empty()) ++unnoticed;
    }
  }
  return unnoticed;
}

TEST(EveryDroppedStepIsNoticed) {
  ForEachSchedule(kNumBroken,
                  [](CollectiveKind collective, Method method, Variant variant) {
                    const RankSchedules sound =
                        MakeRankSchedules(collective, method, kNumBroken, 2, variant);
                    for (int kind = 0; kind < kNumStepKinds; ++kind) {
                      CHECK_EQ(Unnoticed(sound, static_cast<StepKind>(kind), &Drop), 0);
                    }
                  });
}

TEST(EveryRepeatedUseIsNoticed) {
  ForEachSchedule(
      kNumBroken, [](CollectiveKind collective, Method method, Variant variant) {
        const RankSchedules sound =
            MakeRankSchedules(collective, method, kNumBroken, 2, variant);
        for (StepKind kind :
             {StepKind::kMultiply, StepKind::kCopy, StepKind::kReduce, StepKind::kPut,
              StepKind::kPublish, StepKind::kWait, StepKind::kRelease}) {
          CHECK_EQ(Unnoticed(sound, kind, &Repeat), 0);
        }
      });
}

TEST(WaitsInTheWrongOrderAreNoticed) {
  RankSchedules ranks =
      MakeRankSchedules(CollectiveKind::kAllGather, Method::kBulk, 4, 1);
  std::vector<size_t> waits;
  for (size_t step = 0; step < ranks[2].steps.size(); ++step) {
    if (ranks[2].steps[step].kind == StepKind::kWait) waits.push_back(step);
  }
  std::swap(ranks[2].steps[waits[0]], ranks[2].steps[waits[1]]);
  CHECK(!CheckCalls({ranks, ranks}).empty());
}

TEST(AWrongPeerIsNoticed) {
  RankSchedules ranks =
      MakeRankSchedules(CollectiveKind::kReduceScatter, Method::kPipeline, 3, 2);
  for (Step& step : ranks[0].steps) {
    if (step.kind == StepKind::kWait) {
      step.peer = 3 - step.peer;
      break;
    }
  }
  CHECK(!CheckCalls({ranks}).empty());
}

TEST(AWaitForALaterPutOnBothSidesIsACycle) {
  // Both ranks wait before they put, so each put of a rank follows its wait for the
  // other.
  RankSchedules ranks =
      MakeRankSchedules(CollectiveKind::kAllGather, Method::kBulk, 2, 1);
  for (Schedule& schedule : ranks) {
    std::stable_sort(schedule.steps.begin(), schedule.steps.end(),
                     [](const Step& a, const Step& b) {
                       return a.kind == StepKind::kWait && b.kind != StepKind::kWait;
                     });
  }
  const std::vector<std::string> violations = CheckCalls({ranks});
  CHECK_EQ(violations.size(), 2u);
  for (const std::string& violation : violations) {
    CHECK(violation.find("waits for ever") != std::string::npos);
  }
}

// Transformer Engine's schedules have no acks; they are safe only if AG and RS
// alternate.
TEST(WithoutAcksTwoGathersInARowAreARace) {
  RankSchedules ranks =
      MakeRankSchedules(CollectiveKind::kAllGatherMatmul, Method::kRingExchange, 4, 1);
  for (Schedule& schedule : ranks) {
    std::erase_if(schedule.steps,
                  [](const Step& step) { return step.kind == StepKind::kWaitFree; });
  }
  CHECK(CheckCalls({ranks}).empty());
  CHECK(!CheckCalls({ranks, ranks}).empty());
}

}  // namespace
}  // namespace jax_ub

CHECK_MAIN()
