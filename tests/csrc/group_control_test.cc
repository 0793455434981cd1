// Tests the protocol between processes with threads that share plain memory, which
// ThreadSanitizer can observe, and several communicators in one process.
#include "transport/cpu/group_control.h"

#include <atomic>
#include <chrono>
#include <map>
#include <memory>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "check.h"
#include "platform/error.h"
#include "transport/cpu/shared_memory.h"

namespace jax_ub {
namespace {

const std::string kLabel = "all_gather";

WaitReason Reason(double timeout_s = 60) { return {kLabel, 0, timeout_s}; }

CallLogEntry LogEntryOf(int64_t call) {
  return {7 * static_cast<uint64_t>(call), static_cast<uint64_t>(call)};
}

std::vector<std::string> OnEveryProcess(int num_processes,
                                        const std::function<void(int)>& function) {
  std::vector<std::string> errors(num_processes);
  std::vector<std::thread> threads;
  for (int p = 0; p < num_processes; ++p) {
    threads.emplace_back([&, p] {
      try {
        function(p);
      } catch (const std::exception& error) {
        errors[p] = error.what();
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  return errors;
}

// Emulates processes by threads, with control blocks and buffers in plain memory.
template <int num_processes>
struct Processes {
  static constexpr int kNumProcesses = num_processes;
  Processes() {
    std::vector<ProcessControlBlock*> all;
    for (ProcessControlBlock& header : headers) all.push_back(&header);
    std::vector<PeerStatus::PeerName> members;
    for (int p = 0; p < kNumProcesses; ++p) {
      members.push_back({"process " + std::to_string(p)});
    }
    for (int p = 0; p < kNumProcesses; ++p) {
      peer_statuses.push_back(std::make_unique<PeerStatus>(members));
      ends.push_back(std::make_unique<GroupControl>(all, p, *peer_statuses[p]));
    }
  }
  ProcessControlBlock headers[kNumProcesses];
  std::vector<std::unique_ptr<PeerStatus>> peer_statuses;
  std::vector<std::unique_ptr<GroupControl>> ends;
};
using Group4 = Processes<4>;

TEST(WritesBeforeABarrierAreReadAfterIt) {
  constexpr int64_t kNumCalls = 1000;
  Group4 group;
  int64_t buffers[Group4::kNumProcesses][2] = {};  // no atomics: the barrier orders
  const auto errors = OnEveryProcess(Group4::kNumProcesses, [&](int p) {
    std::mt19937 random(p);
    GroupControl& end = *group.ends[p];
    int64_t num_posted = 0;
    for (int64_t call = 0; call < kNumCalls; ++call) {
      const int64_t ahead = random() % 50 == 0 ? 300 : random() % 3;
      while (p == 0 && num_posted < kNumCalls && num_posted <= call + ahead) {
        end.AppendToCallLog(LogEntryOf(num_posted++));
      }
      if (random() % 32 == 0) {
        std::this_thread::sleep_for(std::chrono::microseconds(random() % 300));
      }
      if (p != 0) CHECK(end.WaitForLogEntry(call, Reason()) == LogEntryOf(call));
      buffers[p][call % 2] = call;
      end.PublishSignature(call, call, std::to_string(call + p));
      end.Barrier(call, 0, Reason());
      for (int q = 0; q < Group4::kNumProcesses; ++q) {
        CHECK_EQ(buffers[q][call % 2], call);
        const CallSignature said = end.call_signature(q, call);
        CHECK_EQ(said.signature, static_cast<uint64_t>(call));
        CHECK_EQ(said.text, std::to_string(call + q));
      }
      if (call % 3 == 0) end.Barrier(call, 2, Reason());
    }
  });
  for (const std::string& error : errors) CHECK_EQ(error, "");
}

// Waking a process is a system call, which is counted only if a process sleeps.
TEST(OnlyTheLastProcessToArriveWakesTheOthers) {
  constexpr int kNumProcesses = 16;
  Processes<kNumProcesses> group;
  std::vector<std::thread> sleepers;
  for (int p = 1; p < kNumProcesses; ++p) {
    sleepers.emplace_back([&, p] { group.ends[p]->Barrier(0, 0, Reason()); });
    while (group.headers[p].doorbell.num_sleepers == 0) std::this_thread::yield();
  }
  for (const ProcessControlBlock& header : group.headers)
    CHECK_EQ(header.doorbell.rings.load(), 0u);
  group.ends[0]->Barrier(0, 0, Reason());
  for (std::thread& sleeper : sleepers) sleeper.join();
  uint32_t num_rings = 0;
  for (const ProcessControlBlock& header : group.headers)
    num_rings += header.doorbell.rings;
  CHECK_EQ(num_rings, kNumProcesses - 1u);
}

// The last process may die after its arrival, before it wakes the others.
TEST(ADeathNoticeEndsABarrierThatIsComplete) {
  Group4 group;
  std::vector<std::thread> sleepers;
  for (const int p : {0, 1, 2}) {
    sleepers.emplace_back([&, p] { group.ends[p]->Barrier(0, 0, Reason()); });
    while (group.headers[p].doorbell.num_sleepers == 0) std::this_thread::yield();
  }
  group.headers[3].barrier_generation.store(group.headers[0].barrier_generation.load());
  for (const int p : {0, 1, 2}) {
    group.peer_statuses[p]->SetLost(3, "died");
    group.ends[p]->WakeLocalWaits();
  }
  for (std::thread& sleeper : sleepers) sleeper.join();
}

TEST(AFailedProcessDoesNotArrive) {
  Group4 group;
  group.peer_statuses[2]->Poison(std::make_exception_ptr(Error("it failed")));
  CHECK_THROWS(group.ends[2]->Barrier(5, 2, Reason()), "it failed");
  CHECK_THROWS(group.ends[0]->Barrier(5, 2, Reason(0)), "process 2");
}

TEST(TheDeadlineNamesAllThatAreMissing) {
  Group4 group;
  // Process 2 arrives, and does not wait for the others.
  CHECK_THROWS(group.ends[2]->Barrier(0, 0, Reason(0)),
               "waited 0 s for process 0 and ");
  CHECK_THROWS(group.ends[1]->Barrier(0, 0, Reason(0.05)),
               "CommunicatorError: jax_ub.all_gather: process 1 waited 0.05 s for "
               "process 0 and process 3. JAX_UB_TIMEOUT_S sets the seconds.");
  CHECK_THROWS(group.ends[1]->WaitForLogEntry(0, Reason(0.05)),
               "process 1 waited 0.05 s for process 0 to say which call is next");
}

TEST(LostProcessesAreNamedUnlessTheyHaveArrived) {
  Group4 group;
  for (const int p : {0, 2}) {
    CHECK_THROWS(group.ends[p]->Barrier(0, 0, Reason(0)), "waited");
  }
  group.peer_statuses[1]->SetLost(3, "");
  group.peer_statuses[1]->SetLost(3, "died");
  CHECK_THROWS(group.ends[1]->Barrier(0, 0, Reason()),
               "process 3 closed its communicator, as ub.destroy_ub and the end of a "
               "program do; process 1 waited for process 3");
  // Process 2 had arrived, but its death may be the reason why the other process
  // closed.
  group.peer_statuses[1]->SetLost(2, "died");
  CHECK_THROWS(group.ends[1]->Barrier(0, 0, Reason()),
               "process 2 died; process 1 waited for process 3");
  CHECK_THROWS(group.ends[3]->Barrier(0, 0, Reason(0)), "nothing was thrown");
  group.ends[1]->Barrier(0, 0, Reason());
}

TEST(SatisfiedWaitsDoNotCheckForPoison) {
  Group4 group;
  group.ends[0]->AppendToCallLog({3, 4});
  PeerStatus& peer_status = *group.peer_statuses[1];
  peer_status.Poison(std::make_exception_ptr(Error("the first")));
  peer_status.Poison(std::make_exception_ptr(Error("the second")));
  CHECK(group.ends[1]->WaitForLogEntry(0, Reason()) == (CallLogEntry{3, 4}));
  CHECK_THROWS(group.ends[1]->WaitForLogEntry(1, Reason()), "the first");
}

TEST(ADoorbellRingsOnWhenItsCountWrapsAround) {
  Doorbell bell;
  bell.rings = 0xffffffffu - 50;
  std::atomic<int> stored{0};
  std::thread sleeper([&] {
    for (int i = 1; i <= 200; ++i) {
      CHECK(Await(bell, 60, [&] { return stored.load() >= i; }));
    }
  });
  std::mt19937 random(0);
  for (int i = 1; i <= 200; ++i) {
    if (i % 2 == 0) {  // long enough to sleep
      std::this_thread::sleep_for(std::chrono::microseconds(random() % 500));
    }
    stored = i;
    Ring(bell);
  }
  sleeper.join();
  CHECK(bell.num_sleepers == 0);
}

// Runs `function` with one communicator per thread, as if each thread was a process.
std::vector<std::string> InOneProcess(
    int num_processes, const std::function<void(SharedMemoryCommunicator&)>& function) {
  std::vector<std::unique_ptr<Endpoint>> endpoints;
  std::map<int, PeerAddress> peers;
  std::vector<int> process_of_rank;
  for (int p = 0; p < num_processes; ++p) {
    endpoints.push_back(std::make_unique<Endpoint>());
    peers[p] = endpoints[p]->address();
    process_of_rank.push_back(p);
  }
  return OnEveryProcess(num_processes, [&](int p) {
    function(*SharedMemoryCommunicator::Connect(
        std::move(endpoints[p]), {process_of_rank, p, "tp"}, peers, 4096, 60));
  });
}

TEST(CommunicatorsOfOneProcessConnectAndClose) {
  for (int cycle = 0; cycle < 50; ++cycle) {
    const auto errors = InOneProcess(3, [&](SharedMemoryCommunicator& ranks) {
      std::mt19937 random(cycle * 3 + ranks.process());
      for (int64_t call = 0; call < 20; ++call) ranks.Barrier(call, 0, Reason());
      // Two threads may close the communicator at the same time.
      std::thread other([&] { ranks.Close(); });
      if (random() % 2 == 0) ranks.Close();
      other.join();
    });
    for (const std::string& error : errors) CHECK_EQ(error, "");
  }
}

TEST(AllCommunicatorsOfAProcessReceiveTheFirstPoison) {
  for (int cycle = 0; cycle < 50; ++cycle) {
    const auto errors = InOneProcess(4, [&](SharedMemoryCommunicator& ranks) {
      std::mt19937 random(cycle * 4 + ranks.process());
      std::atomic<int> num_notified{0};
      ranks.OnPoison([&](const std::exception_ptr&) { ++num_notified; });
      ranks.Barrier(0, 0, Reason());
      if (ranks.process() == cycle % 4) {
        std::this_thread::sleep_for(std::chrono::microseconds(random() % 500));
        ranks.Poison(std::make_exception_ptr(
            DeadlineError("CommunicatorError: jax_ub.x: the first")));
      }
      try {
        ranks.Barrier(0, 1, Reason());
      } catch (const DeadlineError&) {
        ranks.Poison(std::current_exception());
        CHECK(ranks.poison() != nullptr);
        ranks.Close();
        CHECK_EQ(num_notified.load(), 1);
        throw;
      }
    });
    for (const std::string& error : errors) {
      CHECK_EQ(error, "CommunicatorError: jax_ub.x: the first");
    }
  }
}

}  // namespace
}  // namespace jax_ub

CHECK_MAIN()
