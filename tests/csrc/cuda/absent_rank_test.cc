// Tests that all other ranks end within their deadline and report an error if a rank
// does not arrive.

#include <barrier>
#include <chrono>
#include <deque>
#include <map>
#include <thread>
#include <vector>

#include "check.h"
#include "cuda/recorded_program.h"

namespace jax_ub {

constexpr uint64_t kTimeoutNs = 50'000'000;
constexpr uint64_t kLongNs = 60'000'000'000;

struct alignas(kFlagLineBytes) Line {
  uint64_t word;
};

// The flags of several ranks, in memory of this process.
class Ranks {
 public:
  Ranks(int num_ranks, int num_slots)
      : num_slots_(num_slots),
        num_lines_(num_slots + 2 * num_ranks + 3),
        lines_(num_ranks * num_lines_),
        errors(num_ranks) {
    for (int rank = 0; rank < num_ranks; ++rank) {
      const auto line = [&](int n) {
        return reinterpret_cast<CUdeviceptr>(&lines_[rank * num_lines_ + n]);
      };
      const int words = num_slots + 2 * num_ranks;
      addresses.push_back({0, line(0), line(num_slots), line(num_slots + num_ranks),
                           line(words), line(words + 1), line(words + 2)});
    }
  }

  uint64_t epoch(int rank) const { return Word(rank, 0) >> kTagBits; }
  bool failed(int rank) const { return Word(rank, 1) != 0; }

 private:
  uint64_t Word(int rank, int n) const {
    return lines_[(rank + 1) * num_lines_ - 3 + n].word;
  }

  int num_slots_;
  int num_lines_;
  std::vector<Line> lines_;

 public:
  std::vector<ErrorRecord> errors;
  std::vector<RankSlotAddress> addresses;
};

// Runs every flag kernel of the lane in order; the contents of slots do not matter. No
// rank begins the second call, which has a short deadline, before all ranks have ended
// the first.
void RunLane(const RankProgram& program, std::barrier<>& all_ended) {
  uint64_t timeout_ns = kLongNs;
  for (Operation operation : program.lane) {
    if (operation.uses_slots()) continue;
    if (operation.kernel->name == kWaitKernel) {
      auto& wait = *reinterpret_cast<WaitParams*>(operation.params.data());
      wait.waiting.timeout_ns = timeout_ns;
    }
    operation.kernel->run(operation.params.data(), 1, 32);
    if (operation.kernel->name == kEndKernel && timeout_ns == kLongNs) {
      timeout_ns = kTimeoutNs;
      all_ended.arrive_and_wait();
    }
  }
}

void ExpectThatAllFail(CollectiveKind kind,
                       Method method,
                       int num_ranks,
                       bool by_multicast = false) {
  const RankSchedules collective = MakeRankSchedules(kind, method, num_ranks, 1);
  Ranks ranks(num_ranks, collective[0].num_slots);
  const Driver driver = RecordingDriver();
  const FlagKernels kernels(driver);
  std::map<Piece, PieceId> pieces;
  std::deque<Recorder> recorders;
  for (int rank = 0; rank < num_ranks; ++rank) {
    const auto error = reinterpret_cast<CUdeviceptr>(&ranks.errors[rank]);
    recorders.emplace_back(driver, kernels, ranks.addresses, error, pieces);
    // The last rank participates only in the first call.
    for (int call = 0; call < (rank < num_ranks - 1 ? 2 : 1); ++call) {
      if (by_multicast) {
        recorders.back().CallByMulticast(collective[rank], kSlotAlignment);
      } else {
        recorders.back().Call(collective[rank], kSlotAlignment);
      }
    }
  }
  std::barrier<> all_ended(num_ranks);
  const auto began = std::chrono::steady_clock::now();
  std::vector<std::thread> threads;
  for (const Recorder& recorder : recorders) {
    threads.emplace_back([&] { RunLane(recorder.program(), all_ended); });
  }
  for (std::thread& thread : threads) thread.join();
  // The waits do not add up, because a failed rank notifies the others at once.
  CHECK(std::chrono::steady_clock::now() - began < std::chrono::seconds(20));
  int num_deadlines = 0;
  for (int rank = 0; rank < num_ranks - 1; ++rank) {
    const ErrorRecord& error = ranks.errors[rank];
    CHECK(ranks.failed(rank));
    CHECK_EQ(ranks.epoch(rank), 1u);
    CHECK_EQ(error.rank, static_cast<uint32_t>(rank));
    CHECK(error.peer != static_cast<uint32_t>(rank));
    if (error.code == ErrorRecord::kDeadline) {
      ++num_deadlines;
      CHECK(error.waited_ns >= kTimeoutNs);
    } else {
      // The error names the rank whose wait failed, not a rank that passed it on.
      CHECK_EQ(error.code, ErrorRecord::kPeerFailed);
      CHECK_EQ(ranks.errors[error.peer].code, ErrorRecord::kDeadline);
    }
  }
  CHECK(num_deadlines > 0);
  CHECK(!ranks.failed(num_ranks - 1));
  CHECK_EQ(ranks.epoch(num_ranks - 1), 1u);
}

TEST(a_missing_rank_fails_all_that_need_it) {
  for (CollectiveKind collective :
       {CollectiveKind::kAllGatherMatmul, CollectiveKind::kMatmulReduceScatter,
        CollectiveKind::kMatmulAllReduce}) {
    for (Method method : {Method::kRingExchange, Method::kPipeline}) {
      for (int num_ranks : {2, 3, 5}) ExpectThatAllFail(collective, method, num_ranks);
    }
  }
}

TEST(a_missing_rank_fails_a_reduction_by_multicast) {
  for (int num_ranks : {2, 3, 5}) {
    ExpectThatAllFail(CollectiveKind::kMatmulAllReduce, Method::kPipeline, num_ranks,
                      true);
  }
}

}  // namespace jax_ub

CHECK_MAIN()
