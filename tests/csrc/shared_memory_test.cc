// Tests ranks in several processes: every mapping has the same words, calls run in the
// leader's order, slots are in the buffers, and delays are random.
#include "transport/cpu/shared_memory.h"

#include <chrono>
#include <cstring>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "check.h"
#include "processes.h"
#include "schedule/schedule.h"

namespace jax_ub {
namespace {

const std::string kLabel = "all_gather_matmul (ub_name 'qkv_fprop')";

WaitReason Reason(double timeout_s = 20) { return {kLabel, 0, timeout_s}; }

void SleepNowAndThen(std::mt19937& random) {
  if (random() % 8 == 0) {
    std::this_thread::sleep_for(std::chrono::microseconds(random() % 300));
  }
}

uint64_t KeyOf(int64_t call) { return 0x9e3779b97f4a7c15u * (call + 1); }
CallLogEntry LogEntryOf(int64_t call) {
  return {KeyOf(call), static_cast<uint64_t>(call)};
}

// Runs all steps of a rank's schedule; returns the number of slots with another value
// than (call, sender).
int64_t WrongReads(Transport& transport, const Schedule& schedule, int64_t call) {
  int64_t num_wrong = 0;
  for (const Step& step : schedule.steps) {
    const int64_t value = call * 1000 + transport.rank();
    if (step.kind == StepKind::kPut) {
      transport.Write(
          step.peer, step.slot,
          {reinterpret_cast<const std::byte*>(&value), 1, sizeof(value), 0});
      transport.Signal(step.peer, step.slot);
    } else if (step.kind == StepKind::kWait) {
      transport.Wait(step.peer, step.slot, Reason());
      int64_t got = 0;
      std::memcpy(&got, transport.slot(step.slot), sizeof(got));
      if (got != call * 1000 + step.peer) ++num_wrong;
    } else if (step.kind == StepKind::kWaitFree) {
      transport.WaitFree(step.peer, step.slot, Reason());
    } else if (step.kind == StepKind::kRelease) {
      transport.Release(step.slot);
    }
  }
  transport.EndCall();
  return num_wrong;
}

// Runs a call in which all ranks read staged buffers, and then a call with slots in the
// same buffers.
void RunCall(SharedMemoryCommunicator& ranks, int64_t call, std::mt19937& random) {
  if (!ranks.is_leader())
    CHECK(ranks.WaitForLogEntry(call, Reason()) == LogEntryOf(call));
  for (const int rank : ranks.local_ranks()) {
    const int64_t staged = call * 100 + rank;
    std::memcpy(ranks.buffer(rank, call), &staged, sizeof(staged));
  }
  const std::string text = "call " + std::to_string(call);
  ranks.PublishSignature(call, KeyOf(call) + ranks.process(), text);
  SleepNowAndThen(random);
  ranks.Barrier(call, 0, Reason());
  for (int p = 0; p < ranks.num_processes(); ++p) {
    const CallSignature said = ranks.call_signature(p, call);
    CHECK_EQ(said.signature, KeyOf(call) + p);
    CHECK_EQ(said.text, text);
  }
  SleepNowAndThen(random);
  for (int rank = 0; rank < ranks.num_ranks(); ++rank) {
    int64_t staged = 0;
    std::memcpy(&staged, ranks.buffer(rank, call), sizeof(staged));
    CHECK_EQ(staged, call * 100 + rank);
  }
  if (call % 3 != 0) return;  // the next call's staging meets readers of this one
  ranks.Barrier(call, 1, Reason());
  const CollectiveKind collective =
      call % 2 == 0 ? CollectiveKind::kAllReduce : CollectiveKind::kAllGather;
  std::vector<std::thread> threads;
  std::atomic<int64_t> num_wrong{0};
  for (const int rank : ranks.local_ranks()) {
    threads.emplace_back([&, rank] {
      const Schedule schedule =
          MakeSchedule(collective, Method::kRingExchange, rank, ranks.num_ranks(), 2);
      num_wrong += WrongReads(
          ranks.rank(rank, call, schedule.num_slots, sizeof(int64_t)), schedule, call);
    });
  }
  for (std::thread& thread : threads) thread.join();
  CHECK_EQ(num_wrong.load(), 0);
}

void CallsGoRight(const std::vector<int>& process_of_rank, int num_calls) {
  Bulletin bulletin;
  const int num_processes =
      *std::max_element(process_of_rank.begin(), process_of_rank.end()) + 1;
  Processes processes(num_processes, [&](int process) {
    const auto ranks = ConnectAs(process, bulletin, process_of_rank, 8192);
    std::mt19937 random(process);
    int64_t num_posted = 0;
    for (int64_t call = 0; call < num_calls; ++call) {
      // Sometimes the leader is further ahead than the log has entries.
      const int64_t ahead = random() % 40 == 0 ? 200 : random() % 3;
      while (ranks->is_leader() && num_posted < num_calls &&
             num_posted <= call + ahead) {
        ranks->AppendToCallLog(LogEntryOf(num_posted++));
      }
      SleepNowAndThen(random);
      RunCall(*ranks, call, random);
      if (call % 50 == 0) {  // long enough for the others to sleep
        std::this_thread::sleep_for(std::chrono::milliseconds(random() % 4));
      }
    }
  });
  for (const std::string& text : processes.Join()) CHECK_EQ(text, "");
}

TEST(TwoProcessesReadWhatTheOtherWrote) { CallsGoRight({0, 1}, 2000); }
TEST(ThreeProcessesReadWhatTheOthersWrote) { CallsGoRight({0, 1, 2}, 600); }
TEST(FourProcessesReadWhatTheOthersWrote) { CallsGoRight({0, 1, 2, 3}, 300); }
TEST(ProcessesHaveSeveralRanksInAnyOrder) { CallsGoRight({1, 0, 1, 2, 0}, 300); }

TEST(ProcessesMayHaveAnyNumbers) {
  Bulletin bulletin;
  Processes processes(2, [&](int p) {
    auto endpoint = std::make_unique<Endpoint>();
    bulletin.Publish(p, endpoint->address());
    std::map<int, PeerAddress> peers;
    for (const auto& [from, address] : bulletin.Read(2)) peers[7 - 3 * from] = address;
    const auto ranks = SharedMemoryCommunicator::Connect(
        std::move(endpoint), {{7, 4, 7}, 7 - 3 * p, "tp"}, peers, 100, 20);
    CHECK_EQ(ranks->num_ranks(), 3);
    CHECK_EQ(ranks->num_processes(), 2);
    CHECK_EQ(ranks->process(), p);
    CHECK_EQ(ranks->processes()[p], 7 - 3 * p);
    CHECK_EQ(ranks->is_leader(), p == 0);
    CHECK(ranks->local_ranks() ==
          (p == 0 ? std::vector<int>{0, 2} : std::vector<int>{1}));
    CHECK_EQ(ranks->process_of_rank(1), 1);
    CHECK_EQ(ranks->buffer_bytes(), 4096);
    CHECK_EQ(ranks->name(), "tp");
    CHECK_EQ(ranks->DescribeProcess(p),
             (p == 0 ? "ranks 0, 2 (process 7, pid " : "rank 1 (process 4, pid ") +
                 std::to_string(getpid()) + ")");
    ranks->Barrier(0, 0, Reason());
  });
  for (const std::string& text : processes.Join()) CHECK_EQ(text, "");
}

TEST(OneProcessIsAGroupToo) {
  Bulletin bulletin;
  Processes processes(1, [&](int process) {
    const auto ranks = ConnectAs(process, bulletin, {0, 0});
    ranks->AppendToCallLog({5, 6});
    ranks->Barrier(0, 0, Reason());
    CHECK(ranks->buffer(1, 1) - ranks->buffer(1, 0) == 4096);
  });
  CHECK_EQ(processes.Join()[0], "");
}

TEST(SlotsThatDoNotFitAreRefused) {
  Bulletin bulletin;
  Processes processes(1, [&](int process) {
    const auto ranks = ConnectAs(process, bulletin, {0, 0}, 4096);
    ranks->rank(0, 0, 64, 64);
    CHECK_THROWS(
        ranks->rank(0, 0, 65, 63),
        "jax_ub.tp: 65 slots of 63 bytes do not fit into a buffer of 4096 bytes "
        "with 4096 flags");
    CHECK_THROWS(ranks->rank(0, 0, 4097, 0), "with 4096 flags");
    CHECK_THROWS(ranks->Barrier(0, 1 << 24, Reason()),
                 "a call has no barrier 16777216");
  });
  CHECK_EQ(processes.Join()[0], "");
}

TEST(LongSignaturesAreTruncated) {
  Bulletin bulletin;
  Processes processes(2, [&](int process) {
    const auto ranks = ConnectAs(process, bulletin, {0, 1});
    ranks->PublishSignature(0, 1, std::string(5000, 'x'));
    ranks->Barrier(0, 0, Reason());
    CHECK_EQ(ranks->call_signature(1 - process, 0).text, std::string(1024, 'x'));
  });
  for (const std::string& text : processes.Join()) CHECK_EQ(text, "");
}

TEST(TwoJobsOfOneNameDoNotConnect) {
  Bulletin bulletins[2];
  Processes processes(4, [&](int process) {
    const int job = process / 2;
    const auto ranks = ConnectAs(process % 2, bulletins[job], {0, 1});
    for (int64_t call = 0; call < 200; ++call) {
      const int64_t value = 10000 * job + call;
      std::memcpy(ranks->buffer(process % 2, call), &value, sizeof(value));
      ranks->Barrier(call, 0, Reason());
      int64_t got = 0;
      std::memcpy(&got, ranks->buffer(1 - process % 2, call), sizeof(got));
      CHECK_EQ(got, value);
    }
  });
  for (const std::string& text : processes.Join()) CHECK_EQ(text, "");
}

}  // namespace
}  // namespace jax_ub

CHECK_MAIN()
