// Communicators of ranks on GPUs of several processes, on the emulated driver: each way to
// share memory, steps down, and what becomes of the others when one fails.
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstring>
#include <filesystem>
#include <functional>
#include <map>
#include <sstream>
#include <string>
#include <thread>
#include <vector>

#include "check.h"
#include "cuda/emulated_driver.h"
#include "cuda/exchange.h"
#include "platform/error.h"
#include "processes.h"
#include "transport/cuda/communicator.h"

namespace jax_ub {
namespace {

// What processes offer, in memory that all of them have.
class OfferBoard {
 public:
  OfferBoard()
      : entries_(new (mmap(nullptr,
                           sizeof(Entry) * Bulletin::kMaxProcesses,
                           PROT_READ | PROT_WRITE,
                           MAP_SHARED | MAP_ANONYMOUS,
                           -1,
                           0)) Entry[Bulletin::kMaxProcesses]) {}
  ~OfferBoard() { munmap(entries_, sizeof(Entry) * Bulletin::kMaxProcesses); }
  OfferBoard(const OfferBoard&) = delete;

  void Publish(int process, const Offer& offer) {
    std::string text;
    for (const auto& [key, value] : offer) {
      text.append(key).append("=").append(value).append("\n");
    }
    std::strcpy(entries_[process].text, text.c_str());
    ++entries_[process].num_published;
  }
  std::map<int, Offer> Read(int num_processes, int round) {
    std::map<int, Offer> offers;
    for (int p = 0; p < num_processes; ++p) {
      while (entries_[p].num_published < round) std::this_thread::yield();
      std::istringstream text(entries_[p].text);
      for (std::string line; std::getline(text, line);) {
        const size_t end = line.find('=');
        offers[p][line.substr(0, end)] = line.substr(end + 1);
      }
    }
    return offers;
  }

 private:
  struct Entry {
    char text[8192];
    std::atomic<int> num_published{0};
  };
  Entry* const entries_;
};

struct Meeting {
  Bulletin bulletin;
  OfferBoard offers;
};

// How a process of a test connects.
struct Side {
  std::vector<int> process_of_rank;
  std::string host = "here";
  int64_t slots_bytes = RankOnGpu::kSlotsBytes;
  double timeout_s = 20;
  int round = 1;
  const Driver* driver = nullptr;  // the emulated one
};

// The n-th own rank is on device n.
std::shared_ptr<CudaCommunicator> ConnectOn(int process, Meeting& meeting, Side side) {
  const std::vector<int>& of_rank = side.process_of_rank;
  const int num_processes = *std::max_element(of_rank.begin(), of_rank.end()) + 1;
  std::vector<int> ordinals(std::count(of_rank.begin(), of_rank.end(), process));
  for (size_t n = 0; n < ordinals.size(); ++n) ordinals[n] = static_cast<int>(n);
  auto endpoint =
      std::make_unique<CudaEndpoint>(side.driver ? *side.driver : EmulatedDriver(),
                                     ordinals, side.slots_bytes, side.host);
  meeting.offers.Publish(process, endpoint->offer());
  meeting.bulletin.Publish(process, endpoint->address());
  const auto offers = meeting.offers.Read(num_processes, side.round);
  auto peers = meeting.bulletin.Read(num_processes, side.round);
  std::erase_if(peers, [&](const auto& peer) {
    return offers.at(peer.first).at("host") != side.host;
  });
  CHECK_EQ(WhyNotConnected(of_rank, offers), "");
  return CudaCommunicator::Connect(std::move(endpoint), {of_rank, process, "tp"}, peers,
                                   offers, side.timeout_s);
}

std::string TextOf(const std::exception_ptr& reason) {
  if (!reason) return "";
  try {
    std::rethrow_exception(reason);
  } catch (const std::exception& error) {
    return error.what();
  }
}

// That failure() comes, at once.
std::string FailureOf(CudaCommunicator& communicator) {
  const auto begin = std::chrono::steady_clock::now();
  while (SecondsSince(begin) < 10) {
    if (const std::exception_ptr reason = communicator.failure()) return TextOf(reason);
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  return "";
}

std::string Describe(const std::vector<StepDown>& steps) {
  std::string text;
  for (const StepDown& step : steps) {
    text.append(step.way).append(": ").append(step.reason).append("\n");
  }
  return text;
}

void CheckAllWell(Processes& processes) {
  for (const std::string& text : processes.Join()) CHECK_EQ(text, "");
}

struct WayCase {
  std::string way;
  EmulatedOptions options;
};

std::vector<WayCase> Ways() {
  EmulatedOptions fabric;
  fabric.has_fd = false;
  fabric.has_fabric = true;
  EmulatedOptions ipc;
  ipc.has_vmm = false;
  return {{"vmm", {}}, {"fabric", fabric}, {"ipc", ipc}};
}

// One rank each, of GPUs of their own or of one that all share; and two each.
TEST(RanksOfSeveralProcessesReachEachOtherInEachWay) {
  for (const WayCase& one : Ways()) {
    for (const std::vector<int>& of_rank :
         std::vector<std::vector<int>>{{0, 1, 2}, {0, 0, 1, 1}, {1, 0, 1}}) {
      for (const bool is_shared : {false, true}) {
        if (is_shared && of_rank.size() != 3) continue;
        Meeting meeting;
        const int num_processes = *std::max_element(of_rank.begin(), of_rank.end()) + 1;
        Processes processes(num_processes, [&](int process) {
          EmulatedOptions options = one.options;
          options.num_devices = 2;
          options.first_device = is_shared ? 0 : 2 * process;
          options.seed = process + 1;
          options.max_delay_us = 100;
          EmulatedMachine machine(options);
          {
            const auto communicator = ConnectOn(process, meeting, {of_rank});
            CHECK_EQ(communicator->how(), one.way);
            RanksOnGpus ranks(communicator);
            CHECK_EQ(ranks.NumWrongOf(10), 0);
            CHECK(!communicator->failure());
          }
          CHECK_EQ(machine.Complaints(), "");
        });
        CheckAllWell(processes);
      }
    }
  }
}

TEST(OneProcessThatCannotTakesAllToTheNextWay) {
  Meeting meeting;
  Processes processes(3, [&](int process) {
    EmulatedOptions options;
    options.first_device = process;
    options.has_vmm = process != 1;
    EmulatedMachine machine(options);
    {
      const auto communicator = ConnectOn(process, meeting, {{0, 1, 2}});
      CHECK_EQ(communicator->how(), "ipc");
      CHECK_EQ(Describe(communicator->step_downs()),
               "vmm: process 1: GPU 0 has no virtual memory management\n"
               "fabric: process 0: GPU 0 has no memory handles for a fabric\n");
      RanksOnGpus ranks(communicator);
      CHECK_EQ(ranks.NumWrongOf(3), 0);
    }
    CHECK_EQ(machine.Complaints(), "");
  });
  CheckAllWell(processes);
}

TEST(FabricHandlesThatAreNotPermittedDoNotHinderDescriptors) {
  Meeting meeting;
  Processes processes(2, [&](int process) {
    EmulatedOptions options;
    options.first_device = process;
    options.has_fabric = true;
    options.fabric_result = CUDA_ERROR_NOT_PERMITTED;
    EmulatedMachine machine(options);
    {
      const CudaEndpoint endpoint(EmulatedDriver(), {0}, 4096, "here");
      CHECK(Contains(endpoint.offer().at("no fabric"),
                     "cuMemCreate: CUDA_ERROR_NOT_PERMITTED"));
      CHECK_EQ(endpoint.offer().at("vmm"), "yes");
      CHECK_EQ(endpoint.offer().at("ipc"), "yes");
    }
    {
      const auto communicator = ConnectOn(process, meeting, {{0, 1}});
      CHECK_EQ(communicator->how(), "vmm");
      CHECK(communicator->step_downs().empty());
    }
    CHECK_EQ(machine.Complaints(), "");
  });
  CheckAllWell(processes);
}

// What is only found out when memory is mapped.
TEST(AWayThatFailsInOneProcessIsGivenUpByAll) {
  for (const char* function : {"MemImportFromShareableHandle", "MemMap", "MemSetAccess",
                               "MemAddressReserve"}) {
    Meeting meeting;
    Processes processes(3, [&](int process) {
      EmulatedMachine machine({.first_device = process});
      // The first one of all but imports is that of the own heap.
      const bool is_import = std::string(function) == "MemImportFromShareableHandle";
      if (process == 2) machine.Fail(function, CUDA_ERROR_UNKNOWN, is_import ? 1 : 2);
      {
        const auto communicator = ConnectOn(process, meeting, {{0, 1, 2}});
        CHECK_EQ(communicator->how(), "ipc");
        CHECK_EQ(communicator->step_downs().size(), 2u);
        CHECK(communicator->step_downs()[0].reason.starts_with(
            std::string("process 2: cu") + function + ": CUDA_ERROR_UNKNOWN"));
        RanksOnGpus ranks(communicator);
        CHECK_EQ(ranks.NumWrongOf(2), 0);
      }
      CHECK_EQ(machine.Complaints(), "");
    });
    CheckAllWell(processes);
  }
}

TEST(WithoutAnyWayAllAreToldTheSame) {
  Meeting meeting;
  Processes processes(3, [&](int process) {
    EmulatedMachine machine({.first_device = process});
    const auto num_files = [] {
      const std::filesystem::directory_iterator files("/proc/self/fd");
      return std::distance(begin(files), end(files));
    };
    const auto before = num_files();
    if (process == 0)
      machine.Fail("MemImportFromShareableHandle", CUDA_ERROR_UNKNOWN, 0);
    if (process == 1) machine.Fail("IpcOpenMemHandle", CUDA_ERROR_NOT_PERMITTED, 0);
    std::string text;
    try {
      ConnectOn(process, meeting, {{0, 1, 2}});
    } catch (const UnsupportedError& error) {
      text = error.what();
    }
    CHECK(text.starts_with(
        "jax_ub.tp: its processes have no way to share device memory: "));
    CHECK(Contains(text,
                   "; vmm: process 0: cuMemImportFromShareableHandle: CUDA_ERROR_"));
    CHECK(Contains(text,
                   "; ipc: process 1: cuIpcOpenMemHandle: CUDA_ERROR_NOT_PERMITTED"));
    CHECK_EQ(num_files(), before);
    CHECK_EQ(machine.Complaints(), "");
  });
  CheckAllWell(processes);
}

TEST(AProcessWithoutRoomEndsAllAtOnce) {
  Meeting meeting;
  Processes processes(2, [&](int process) {
    // With ipc the heap is allocated only when that way is taken.
    EmulatedMachine machine({.first_device = process});
    if (process == 0)
      machine.Fail("MemImportFromShareableHandle", CUDA_ERROR_UNKNOWN, 0);
    if (process == 1) machine.Fail("MemAlloc", CUDA_ERROR_OUT_OF_MEMORY, 2);
    AtOnce([&] {
      ConnectOn(process, meeting, {.process_of_rank = {0, 1}, .timeout_s = 60});
    });
  });
  for (const std::string& text : processes.Join()) {
    CHECK(text.starts_with("CommunicatorError: "));
    CHECK(Contains(text, "cuMemAlloc: CUDA_ERROR_OUT_OF_MEMORY"));
  }
}

TEST(ProcessesThatWantDifferentHeapsAreToldBoth) {
  Meeting meeting;
  Processes processes(2, [&](int process) {
    EmulatedMachine machine({.first_device = process});
    AtOnce([&] {
      ConnectOn(process, meeting,
                {.process_of_rank = {0, 1}, .slots_bytes = 4096 * (process + 1)});
    });
  });
  for (const std::string& text : processes.Join()) {
    CHECK(Contains(text, "slots of 4096 bytes on GPUs"));
    CHECK(Contains(text, "slots of 8192 bytes on GPUs"));
  }
}

// The driver's call ends the process in the midst of sharing.
TEST(AProcessThatDiesWhileItSharesIsNamedAtOnce) {
  Meeting meeting;
  Processes processes(3, [&](int process) {
    EmulatedMachine machine({.first_device = process});
    Driver driver = EmulatedDriver();
    if (process == 1) {
      driver.MemImportFromShareableHandle = [](CUmemGenericAllocationHandle*, void*,
                                               CUmemAllocationHandleType) -> CUresult {
        kill(getpid(), SIGKILL);
        return CUDA_SUCCESS;
      };
    }
    AtOnce([&] {
      ConnectOn(process, meeting,
                {.process_of_rank = {0, 1, 2}, .timeout_s = 60, .driver = &driver});
    });
  });
  const std::vector<std::string> texts = processes.Join();
  for (const int p : {0, 2}) {
    CHECK_EQ(texts[p], "CommunicatorError: jax_ub.tp: " + NameOf(1, processes.pid(1)) +
                           " died before all had shared their memory");
  }
}

TEST(APeerThatDoesNotShareIsNamedAtTheDeadline) {
  Meeting meeting;
  Processes processes(2, [&](int process) {
    EmulatedMachine machine({.first_device = process});
    Driver driver = EmulatedDriver();
    if (process == 1) {
      driver.MemImportFromShareableHandle = [](CUmemGenericAllocationHandle*, void*,
                                               CUmemAllocationHandleType) -> CUresult {
        Hang();
      };
    }
    ConnectOn(process, meeting,
              {.process_of_rank = {0, 1}, .timeout_s = 0.5, .driver = &driver});
  });
  std::this_thread::sleep_for(std::chrono::milliseconds(1500));
  processes.Signal(1, SIGKILL);
  const std::string text = processes.Join()[0];
  CHECK(Contains(
      text, " waited 0.5 s for " + NameOf(1, processes.pid(1)) + " to share memory"));
}

TEST(ADeathEndsTheWaitsOfDevicesAtOnce) {
  for (const WayCase& one : Ways()) {
    Meeting meeting;
    Processes processes(3, [&](int process) {
      EmulatedOptions options = one.options;
      options.first_device = process;
      EmulatedMachine machine(options);
      const auto communicator = ConnectOn(process, meeting, {{0, 1, 2}});
      RanksOnGpus ranks(communicator);
      CHECK_EQ(ranks.NumWrongOf(2), 0);
      ++meeting.bulletin.word();
      if (process == 1) Hang();
      ranks.Enqueue(3);
      meeting.bulletin.WaitForWord(4);  // process 1 is dead
      AtOnce([&] {
        CHECK(ranks[0].IsSpoilt());
        throw CommunicatorError(FailureOf(*communicator));
      });
    });
    meeting.bulletin.WaitForWord(3);
    processes.Signal(1, SIGKILL);
    ++meeting.bulletin.word();
    const std::vector<std::string> texts = processes.Join();
    for (const int p : {0, 2}) {
      CHECK_EQ(texts[p], "CommunicatorError: jax_ub.tp: " +
                             NameOf(1, processes.pid(1)) + " died");
    }
  }
}

TEST(PoisonReachesAllProcessesWithItsReason) {
  Meeting meeting;
  Processes processes(3, [&](int process) {
    EmulatedMachine machine({.first_device = process});
    {
      const auto communicator = ConnectOn(process, meeting, {{0, 1, 2}});
      RanksOnGpus ranks(communicator);
      meeting.bulletin.WaitForWord(1);  // the pid of process 1
      if (process == 1) {
        communicator->Poison(std::make_exception_ptr(Error("boom")));
        CHECK_EQ(FailureOf(*communicator), "boom");
      } else {
        ranks.Enqueue(1);
        CHECK(ranks[0].IsSpoilt());
        CHECK_EQ(FailureOf(*communicator),
                 "CommunicatorError: jax_ub.tp: " + NameOf(1, meeting.bulletin.word()) +
                     " failed: boom");
      }
    }
    CHECK_EQ(machine.Complaints(), "");
  });
  meeting.bulletin.word() = processes.pid(1);
  CheckAllWell(processes);
}

// The rank that waited in vain says so; the others hear of it from their own devices
// first, and then why.
TEST(ADeadlineOfOneRankIsTheReasonOfAll) {
  Meeting meeting;
  Processes processes(3, [&](int process) {
    EmulatedMachine machine({.first_device = process});
    {
      const auto communicator = ConnectOn(process, meeting, {{0, 1, 2}});
      RanksOnGpus ranks(communicator);
      if (process == 0) {
        ranks.Enqueue(1, 0.1);
        CHECK(ranks[0].IsSpoilt());
        ++meeting.bulletin.word();
      } else if (process == 1) {
        ranks.Enqueue(1);
        meeting.bulletin.WaitForWord(1);
        CHECK(ranks[0].IsSpoilt());
        // Its peer's host has not looked yet.
        const std::string text = FailureOf(*communicator);
        CHECK(Contains(text,
                       "CommunicatorError: jax_ub.exchange (ub_name 'qkv'): rank 0 "));
        CHECK(Contains(text, " failed, and told rank 1 ("));
        ++meeting.bulletin.word();
      }
      meeting.bulletin.WaitForWord(2);
      std::string text;
      const auto begin = std::chrono::steady_clock::now();
      do {
        text = FailureOf(*communicator);
      } while (!Contains(text, "waited") && SecondsSince(begin) < 10);
      CHECK(
          text.starts_with("CommunicatorError: jax_ub.exchange (ub_name 'qkv'): rank 0 "
                           "(process 0, pid "));
      CHECK(Contains(text, ") waited 0.1"));
      CHECK(Contains(text, " s for chunk "));
      try {
        communicator->ThrowIfFailed();
        CHECK(false);
      } catch (const DeadlineError&) {
      }
    }
    CHECK_EQ(machine.Complaints(), "");
  });
  CheckAllWell(processes);
}

// Who closes first waits for what the others still do with its memory.
TEST(ClosingWaitsForAllPeers) {
  for (const WayCase& one : Ways()) {
    Meeting meeting;
    Processes processes(3, [&](int process) {
      EmulatedOptions options = one.options;
      options.first_device = process;
      options.max_delay_us = 3000;
      options.seed = process + 9;
      EmulatedMachine machine(options);
      {
        const auto communicator = ConnectOn(process, meeting, {{0, 1, 2}});
        RanksOnGpus ranks(communicator);
        if (process == 2) std::this_thread::sleep_for(std::chrono::milliseconds(100));
        ranks.Enqueue(1);
        const int late = process == 1 ? 1 : 0;
        if (late) std::this_thread::sleep_for(std::chrono::milliseconds(200));
        meeting.bulletin.word() += late;
        communicator->Close();
        CHECK_EQ(meeting.bulletin.word().load(), 1);
        CHECK_EQ(ranks.NumWrong(1), 0);
      }
      CHECK_EQ(machine.Complaints(), "");
    });
    CheckAllWell(processes);
  }
}

TEST(AClosedPeerIsNoFailureButNoMoreCalls) {
  Meeting meeting;
  Processes processes(2, [&](int process) {
    EmulatedMachine machine({.first_device = process});
    {
      const auto communicator = ConnectOn(process, meeting, {{0, 1}});
      if (process == 0) {
        communicator->Close();
      } else {
        std::string text;
        const auto begin = std::chrono::steady_clock::now();
        while (text.empty() && SecondsSince(begin) < 10) {
          try {
            communicator->ThrowIfFailed();
          } catch (const CommunicatorError& error) {
            text = error.what();
          }
        }
        CHECK(
            text.starts_with("CommunicatorError: jax_ub.tp: rank 0 (process 0, pid "));
        CHECK(text.ends_with(") closed its communicator"));
        CHECK(!communicator->failure());
      }
    }
    CHECK_EQ(machine.Complaints(), "");
  });
  CheckAllWell(processes);
}

TEST(ClosingDoesNotWaitForTheDeadAndForTheStoppedNotForEver) {
  for (const int signal : {SIGKILL, SIGSTOP}) {
    Meeting meeting;
    Processes processes(2, [&](int process) {
      EmulatedMachine machine({.first_device = process});
      auto communicator =
          ConnectOn(process, meeting, {.process_of_rank = {0, 1}, .timeout_s = 0.5});
      ++meeting.bulletin.word();
      if (process == 1) Hang();
      meeting.bulletin.WaitForWord(3);
      AtOnce([&] { communicator->Close(); });
      communicator.reset();
      CHECK_EQ(machine.Complaints(), "");
    });
    meeting.bulletin.WaitForWord(2);
    processes.Signal(1, signal);
    ++meeting.bulletin.word();
    std::this_thread::sleep_for(
        std::chrono::milliseconds(signal == SIGSTOP ? 1000 : 0));
    processes.Signal(1, SIGKILL);
    CHECK_EQ(processes.Join()[0], "");
  }
}

// Between hosts there is what bootstrap carries, and no connection.
TEST(HostsShareByFabricHandles) {
  Meeting meeting;
  Processes processes(3, [&](int process) {
    EmulatedOptions options;
    options.first_device = process;
    options.has_fabric = true;
    EmulatedMachine machine(options);
    {
      const auto communicator = ConnectOn(
          process, meeting,
          {.process_of_rank = {0, 1, 2}, .host = process == 2 ? "there" : "here"});
      CHECK_EQ(communicator->how(), "fabric");
      CHECK_EQ(Describe(communicator->step_downs()), "vmm: its ranks span 2 hosts\n");
      RanksOnGpus ranks(communicator);
      CHECK_EQ(ranks.NumWrongOf(5), 0);
      // No goodbye comes from the other host.
      ++meeting.bulletin.word();
      meeting.bulletin.WaitForWord(3);
    }
    CHECK_EQ(machine.Complaints(), "");
  });
  CheckAllWell(processes);
}

TEST(NothingIsLeftAfterManyCyclesOfSeveralProcesses) {
  constexpr int kNumCycles = 100;
  Meeting meeting;
  Processes processes(2, [&](int process) {
    EmulatedMachine machine({.first_device = process});
    const auto count = [](const char* folder) {
      const std::filesystem::directory_iterator files(folder);
      return std::distance(begin(files), end(files));
    };
    ptrdiff_t num_files = 0;
    for (int round = 1; round <= kNumCycles; ++round) {
      {
        const auto communicator =
            ConnectOn(process, meeting, {.process_of_rank = {0, 1}, .round = round});
        if (round % 10 == 1) {
          RanksOnGpus ranks(communicator);
          CHECK_EQ(ranks.NumWrongOf(1), 0);
        }
        if (round % 4 == 0) communicator->Poison(std::make_exception_ptr(Error("x")));
        if (round % 2 == 0) communicator->Close();
      }
      if (round == 1) num_files = count("/proc/self/fd");
      CHECK_EQ(machine.Live().Describe(), "");
    }
    CHECK_EQ(count("/proc/self/fd"), num_files);
    CHECK_EQ(machine.Complaints(), "");
  });
  CheckAllWell(processes);
}

// A child of fork has no part in its parent's communicator.
TEST(AForkedChildHarmsNobody) {
  Meeting meeting;
  Processes processes(2, [&](int process) {
    EmulatedMachine machine({.first_device = process});
    {
      auto communicator = ConnectOn(process, meeting, {{0, 1}});
      if (process == 0) {
        const pid_t child = fork();
        if (child == 0) {
          communicator->Poison(std::make_exception_ptr(Error("of the child")));
          communicator.reset();
          _exit(0);
        }
        int status = 1;
        waitpid(child, &status, 0);
        CHECK_EQ(status, 0);
      }
      RanksOnGpus ranks(communicator);
      CHECK_EQ(ranks.NumWrongOf(2), 0);
      CHECK(!communicator->failure());
    }
    CHECK_EQ(machine.Complaints(), "");
  });
  CheckAllWell(processes);
}

}  // namespace
}  // namespace jax_ub

CHECK_MAIN()
