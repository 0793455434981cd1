// Tests ranks on GPUs of several processes, on the emulated driver, if one process
// dies, fails, reaches its deadline or closes.
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <string>
#include <thread>
#include <vector>

#include "check.h"
#include "cuda/address_exchange.h"
#include "cuda/emulated_driver.h"
#include "cuda/exchange.h"
#include "platform/error.h"
#include "processes.h"
#include "transport/cuda/communicator.h"

namespace jax_ub {
namespace {

// The process ends inside a driver call while memory is being shared.
TEST(AProcessThatDiesWhileItSharesIsNamedAtOnce) {
  AddressExchange addresses;
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
      ConnectOn(process, addresses,
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
  AddressExchange addresses;
  Processes processes(2, [&](int process) {
    EmulatedMachine machine({.first_device = process});
    Driver driver = EmulatedDriver();
    if (process == 1) {
      driver.MemImportFromShareableHandle = [](CUmemGenericAllocationHandle*, void*,
                                               CUmemAllocationHandleType) -> CUresult {
        Hang();
      };
    }
    try {
      ConnectOn(process, addresses,
                {.process_of_rank = {0, 1}, .timeout_s = 2, .driver = &driver});
    } catch (...) {
      ++addresses.bulletin.word();
      throw;
    }
  });
  addresses.bulletin.WaitForWord(1);
  processes.Signal(1, SIGKILL);
  const std::string text = processes.Join()[0];
  CHECK(Contains(
      text, " waited 2 s for " + NameOf(1, processes.pid(1)) + " to share memory"));
}

TEST(ADeathEndsTheWaitsOfDevicesAtOnce) {
  for (const WayCase& one : Ways()) {
    AddressExchange addresses;
    Processes processes(3, [&](int process) {
      EmulatedOptions options = one.options;
      options.first_device = process;
      EmulatedMachine machine(options);
      const auto communicator = ConnectOn(process, addresses, {{0, 1, 2}});
      RanksOnGpus ranks(communicator);
      CHECK_EQ(ranks.NumWrongOf(2), 0);
      ++addresses.bulletin.word();
      if (process == 1) Hang();
      ranks.Enqueue(3);
      addresses.bulletin.WaitForWord(4);  // process 1 is dead
      AtOnce([&] {
        CHECK(ranks[0].IsFilledWithNan());
        throw CommunicatorError(WithLabel(*communicator));
      });
    });
    addresses.bulletin.WaitForWord(3);
    processes.Signal(1, SIGKILL);
    ++addresses.bulletin.word();
    const std::vector<std::string> texts = processes.Join();
    for (const int p : {0, 2}) {
      CHECK_EQ(texts[p], "CommunicatorError: jax_ub.tp: " +
                             NameOf(1, processes.pid(1)) + " died");
    }
  }
}

// Process 0 detects the death of process 2 before process 1 does, and its device
// notifies the device of process 1.
TEST(ADeathThatIsNoticedLateIsTheReasonOfANotifiedRank) {
  AddressExchange addresses;
  Processes processes(3, [&](int process) {
    EmulatedMachine machine({.first_device = process});
    const auto communicator = ConnectOn(process, addresses, {{0, 1, 2}});
    if (process == 1) Notify(*communicator, 1, 0);
    ++addresses.bulletin.word();
    if (process == 2) Hang();
    if (process == 1) throw CommunicatorError(check::TextOf(communicator->failure()));
    throw CommunicatorError(WithLabel(*communicator));
  });
  addresses.bulletin.WaitForWord(3);
  std::this_thread::sleep_for(std::chrono::milliseconds(50));
  processes.Signal(2, SIGKILL);
  const std::vector<std::string> texts = processes.Join();
  for (const int p : {0, 1}) {
    CHECK_EQ(texts[p],
             "CommunicatorError: jax_ub.tp: " + NameOf(2, processes.pid(2)) + " died");
  }
}

TEST(PoisonReachesAllProcessesWithItsReason) {
  AddressExchange addresses;
  Processes processes(3, [&](int process) {
    EmulatedMachine machine({.first_device = process});
    {
      const auto communicator = ConnectOn(process, addresses, {{0, 1, 2}});
      RanksOnGpus ranks(communicator);
      addresses.bulletin.WaitForWord(1);  // the pid of process 1
      if (process == 1) {
        communicator->Poison(std::make_exception_ptr(Error("boom")));
        CHECK_EQ(WithLabel(*communicator), "boom");
      } else {
        ranks.Enqueue(1);
        CHECK(ranks[0].IsFilledWithNan());
        CHECK_EQ(WithLabel(*communicator), "CommunicatorError: jax_ub.tp: " +
                                               NameOf(1, addresses.bulletin.word()) +
                                               " failed: boom");
      }
    }
    CHECK_EQ(machine.Complaints(), "");
  });
  addresses.bulletin.word() = processes.pid(1);
  CheckAllWell(processes);
}

// The rank that reached its deadline reports it; the others are first notified by their
// devices, and then receive the reason.
TEST(ADeadlineOfOneRankIsTheReasonOfAll) {
  AddressExchange addresses;
  Processes processes(3, [&](int process) {
    EmulatedMachine machine({.first_device = process});
    {
      const auto communicator = ConnectOn(process, addresses, {{0, 1, 2}});
      RanksOnGpus ranks(communicator);
      if (process == 0) {
        ranks.Enqueue(1, 0.1);
        CHECK(ranks[0].IsFilledWithNan());
        ++addresses.bulletin.word();
      } else if (process == 1) {
        ranks.Enqueue(1);
        addresses.bulletin.WaitForWord(1);
        CHECK(ranks[0].IsFilledWithNan());
        // The peer's host has not read the error record yet.
        const std::string text = check::TextOf(communicator->failure());
        CHECK(Contains(text,
                       "CommunicatorError: jax_ub.exchange (ub_name 'qkv'): rank 0 "));
        CHECK(Contains(text, " failed and notified rank 1 ("));
        ++addresses.bulletin.word();
      }
      addresses.bulletin.WaitForWord(2);
      const std::string text = WithLabel(*communicator);
      CHECK(
          text.starts_with("CommunicatorError: jax_ub.exchange (ub_name 'qkv'): rank 0 "
                           "(process 0, pid "));
      CHECK(Contains(text, ") waited "));
      CHECK(SecondsWaited(text) >= 0.1);
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

TEST(ADeadlineThatNoCallReportsIsSentWhenItsProcessCloses) {
  AddressExchange addresses;
  Processes processes(2, [&](int process) {
    EmulatedMachine machine({.first_device = process});
    {
      const auto communicator = ConnectOn(process, addresses, {{0, 1}});
      RanksOnGpus ranks(communicator);
      if (process == 0) {
        ranks.Enqueue(1, 0.1);
        CHECK(ranks[0].IsFilledWithNan());
        communicator->Close();
      } else {
        const std::string text = WithLabel(*communicator);
        CHECK(Contains(text, ": rank 0 (process 0, pid "));
        CHECK(Contains(text, ") waited "));
      }
    }
    CHECK_EQ(machine.Complaints(), "");
  });
  CheckAllWell(processes);
}

// A process that closes first waits until the others no longer use its memory.
TEST(ClosingWaitsForAllPeers) {
  for (const WayCase& one : Ways()) {
    AddressExchange addresses;
    Processes processes(3, [&](int process) {
      EmulatedOptions options = one.options;
      options.first_device = process;
      options.max_delay_us = 3000;
      options.seed = process + 9;
      EmulatedMachine machine(options);
      {
        const auto communicator = ConnectOn(process, addresses, {{0, 1, 2}});
        RanksOnGpus ranks(communicator);
        if (process == 2) std::this_thread::sleep_for(std::chrono::milliseconds(100));
        ranks.Enqueue(1);
        const int late = process == 1 ? 1 : 0;
        if (late) std::this_thread::sleep_for(std::chrono::milliseconds(200));
        addresses.bulletin.word() += late;
        communicator->Close();
        CHECK_EQ(addresses.bulletin.word().load(), 1);
        CHECK_EQ(ranks.NumWrong(1), 0);
      }
      CHECK_EQ(machine.Complaints(), "");
    });
    CheckAllWell(processes);
  }
}

TEST(AClosedPeerIsNoFailureButNoMoreCalls) {
  AddressExchange addresses;
  Processes processes(2, [&](int process) {
    EmulatedMachine machine({.first_device = process});
    {
      const auto communicator = ConnectOn(process, addresses, {{0, 1}});
      if (process == 0) {
        communicator->Close();
      } else {
        std::string text;
        const auto begin = std::chrono::steady_clock::now();
        while (text.empty() && SecondsSince(begin) < kAtOnceS) {
          try {
            communicator->ThrowIfFailed();
          } catch (const CommunicatorError& error) {
            text = error.what();
          }
        }
        CHECK(
            text.starts_with("CommunicatorError: jax_ub.tp: rank 0 (process 0, pid "));
        CHECK(Contains(text, ") closed its communicator, as ub.destroy_ub and"));
        CHECK(!communicator->failure());
      }
    }
    CHECK_EQ(machine.Complaints(), "");
  });
  CheckAllWell(processes);
}

TEST(ClosingWaitsNotForDeadAndBrieflyForStoppedProcesses) {
  for (const int signal : {SIGKILL, SIGSTOP}) {
    AddressExchange addresses;
    Processes processes(2, [&](int process) {
      EmulatedMachine machine({.first_device = process});
      // The others wait only for the stopped process.
      auto communicator = ConnectOn(
          process, addresses,
          {.process_of_rank = {0, 1}, .timeout_s = signal == SIGSTOP ? 2.0 : 60.0});
      ++addresses.bulletin.word();
      if (process == 1) Hang();
      addresses.bulletin.WaitForWord(3);
      AtOnce([&] { communicator->Close(); });
      ++addresses.bulletin.word();
      communicator.reset();
      CHECK_EQ(machine.Complaints(), "");
    });
    addresses.bulletin.WaitForWord(2);
    processes.Signal(1, signal);
    ++addresses.bulletin.word();
    addresses.bulletin.WaitForWord(4);  // process 0 has closed
    processes.Signal(1, SIGKILL);
    CHECK_EQ(processes.Join()[0], "");
  }
}

// A forked child does not affect its parent's communicator.
TEST(AForkedChildDoesNotAffectItsParent) {
  AddressExchange addresses;
  Processes processes(2, [&](int process) {
    EmulatedMachine machine({.first_device = process});
    {
      auto communicator = ConnectOn(process, addresses, {{0, 1}});
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
