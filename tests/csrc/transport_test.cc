// Tests slots between threads: order, reuse, wrap-around, deadlines and poison.
#include "transport/transport.h"

#include <atomic>
#include <chrono>
#include <cstring>
#include <functional>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "check.h"
#include "platform/error.h"
#include "schedule/schedule.h"
#include "transport/cpu/in_process.h"

namespace jax_ub {
namespace {

const std::string kLabel = "all_gather_matmul (ub_name 'qkv_fprop')";
constexpr double kLongS = 60;

WaitReason Reason(int chunk, double timeout_s = kLongS) {
  return {kLabel, chunk, timeout_s};
}

Rows OneRow(const int64_t& value) {
  return {reinterpret_cast<const std::byte*>(&value), 1, sizeof(value), sizeof(value)};
}

// Runs `function(rank)` in one thread per rank; returns the text of each rank's
// exception.
std::vector<std::string> OnEveryRank(int num_ranks,
                                     const std::function<void(int)>& function) {
  std::vector<std::string> errors(num_ranks);
  std::vector<std::thread> threads;
  for (int rank = 0; rank < num_ranks; ++rank) {
    threads.emplace_back([&, rank] {
      try {
        function(rank);
      } catch (const std::exception& error) {
        errors[rank] = error.what();
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  return errors;
}

// Runs a rank's steps for `num_calls` calls, with random delays; returns the number of
// slots with another value than (call, sender).
int64_t WrongReads(InProcessCommunicator& communicator,
                   const std::vector<CollectiveKind>& collectives,
                   Method method,
                   int rank,
                   int num_calls) {
  Transport& transport = communicator.rank(rank);
  std::mt19937 random(rank);
  int64_t num_wrong = 0;
  for (int call = 0; call < num_calls; ++call) {
    const Schedule schedule = MakeSchedule(collectives[call % collectives.size()],
                                           method, rank, communicator.num_ranks(), 2);
    if (random() % 16 == 0) {
      std::this_thread::sleep_for(std::chrono::microseconds(random() % 100));
    }
    for (const Step& step : schedule.steps) {
      const int64_t value = call * 1000 + rank;
      if (step.kind == StepKind::kPut) {
        transport.Write(step.peer, step.slot, OneRow(value));
        transport.Signal(step.peer, step.slot);
      } else if (step.kind == StepKind::kWait) {
        transport.Wait(step.peer, step.slot, Reason(step.chunk));
        int64_t got = 0;
        std::memcpy(&got, transport.slot(step.slot), sizeof(got));
        if (got != call * 1000 + step.peer) ++num_wrong;
      } else if (step.kind == StepKind::kWaitFree) {
        transport.WaitFree(step.peer, step.slot, Reason(step.chunk));
      } else if (step.kind == StepKind::kRelease) {
        transport.Release(step.slot);
      }
    }
    transport.EndCall();
  }
  return num_wrong;
}

void NoWrongReads(const std::vector<CollectiveKind>& collectives,
                  Method method,
                  uint32_t epoch) {
  constexpr int kNumCalls = 300;
  for (int num_ranks : {2, 3, 4}) {
    InProcessCommunicator communicator(num_ranks, 4 * num_ranks, sizeof(int64_t),
                                       epoch);
    std::atomic<int64_t> num_wrong{0};
    const auto errors = OnEveryRank(num_ranks, [&](int rank) {
      num_wrong += WrongReads(communicator, collectives, method, rank, kNumCalls);
    });
    for (const std::string& error : errors) CHECK_EQ(error, "");
    CHECK_EQ(num_wrong.load(), 0);
  }
}

TEST(GathersInARowReadWhatWasSent) {
  NoWrongReads({CollectiveKind::kAllGather}, Method::kRingExchange, 0);
  NoWrongReads({CollectiveKind::kAllGather}, Method::kPipeline, 0);
}

TEST(ScattersInARowReadWhatWasSent) {
  NoWrongReads({CollectiveKind::kReduceScatter}, Method::kBulk, 0);
}

TEST(GathersAndScattersInAnyOrderReadWhatWasSent) {
  NoWrongReads({CollectiveKind::kAllGather, CollectiveKind::kReduceScatter,
                CollectiveKind::kReduceScatter, CollectiveKind::kAllReduce,
                CollectiveKind::kAllGather, CollectiveKind::kAllReduce},
               Method::kRingExchange, 0);
}

TEST(EpochsWrapAround) {
  NoWrongReads({CollectiveKind::kAllGather, CollectiveKind::kReduceScatter},
               Method::kPipeline, 0xffffffffu - 100);
  NoWrongReads({CollectiveKind::kAllGather}, Method::kRingExchange, 0x7fffffffu - 100);
}

TEST(RowsArrivePacked) {
  InProcessCommunicator communicator(2, 1, 6);
  const char source[] = "ab..cd..ef..";
  const auto* data = reinterpret_cast<const std::byte*>(source);
  communicator.rank(0).Write(1, 0, {data, 3, 2, 4});
  communicator.rank(0).Signal(1, 0);
  communicator.rank(1).Wait(0, 0, Reason(0));
  CHECK_EQ(std::memcmp(communicator.rank(1).slot(0), "abcdef", 6), 0);
}

TEST(ASplitThatDoesNotFitIsRejected) {
  InProcessCommunicator communicator(2, 1, 64);
  std::vector<std::byte> data(65);
  CHECK_THROWS(communicator.rank(0).Write(1, 0, {data.data(), 1, 65, 65}),
               "65 bytes does not fit into a slot of 64");
}

TEST(AMissingPeerIsNamedAtTheDeadline) {
  InProcessCommunicator communicator(3, 2, 8);
  const auto begin = std::chrono::steady_clock::now();
  CHECK_THROWS(communicator.rank(2).Wait(1, 0, Reason(7, 0.05)),
               "CommunicatorError: jax_ub." + kLabel +
                   ": rank 2 waited 0.05 s for chunk 7 of rank 1");
  const std::chrono::duration<double> elapsed_s =
      std::chrono::steady_clock::now() - begin;
  CHECK(elapsed_s.count() >= 0.05);
}

TEST(ASlotThatIsNeverReleasedIsNamedAtTheDeadline) {
  InProcessCommunicator communicator(2, 1, 8);
  communicator.rank(0).WaitFree(1, 0, Reason(0, 0.05));
  communicator.rank(0).Signal(1, 0);
  communicator.rank(0).EndCall();
  CHECK_THROWS(communicator.rank(0).WaitFree(1, 0, Reason(3, 0.05)),
               "waited 0.05 s for rank 1 to release the slot of chunk 3");
}

TEST(PoisonWakesAllWaitsWithTheFirstReason) {
  constexpr int kNumRanks = 5;
  InProcessCommunicator communicator(kNumRanks, 1, 8);
  const auto begin = std::chrono::steady_clock::now();
  const auto errors = OnEveryRank(kNumRanks, [&](int rank) {
    if (rank == 0) {
      std::this_thread::sleep_for(std::chrono::milliseconds(30));
      communicator.Poison(std::make_exception_ptr(CommunicatorError("rank 0 died")));
      communicator.Poison(std::make_exception_ptr(CommunicatorError("later")));
      return;
    }
    communicator.rank(rank).Wait(0, 0, Reason(0));
  });
  const std::chrono::duration<double> elapsed_s =
      std::chrono::steady_clock::now() - begin;
  for (int rank = 1; rank < kNumRanks; ++rank) CHECK_EQ(errors[rank], "rank 0 died");
  CHECK(elapsed_s.count() < kLongS / 2);
  CHECK_THROWS(communicator.rank(1).Wait(2, 0, Reason(0)), "rank 0 died");
  communicator.rank(1).WaitFree(2, 0, Reason(0));  // is free: nothing to wait for
}

}  // namespace
}  // namespace jax_ub

CHECK_MAIN()
