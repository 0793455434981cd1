// Tests failures of a process: what its peers learn of them, and when.
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <string>
#include <thread>
#include <vector>

#include "check.h"
#include "no_thread_starts.h"
#include "platform/error.h"
#include "processes.h"
#include "transport/cpu/shared_memory.h"

namespace jax_ub {
namespace {

const std::string kLabel = "matmul_reduce_scatter (ub_name 'fc2_fprop')";
const std::string kPrefix = "CommunicatorError: jax_ub." + kLabel + ": ";

WaitReason Reason(double timeout_s = 60) { return {kLabel, 0, timeout_s}; }

TEST(AProcessThatIsKilledIsNamedAtOnce) {
  Bulletin bulletin;
  Processes processes(3, [&](int process) {
    const auto ranks = ConnectAs(process, bulletin, {0, 1, 2});
    ranks->Barrier(0, 0, Reason());
    ++bulletin.word();
    if (process == 1) Hang();
    bulletin.WaitForWord(4);
    AtOnce([&] { ranks->Barrier(0, 1, Reason()); });
  });
  bulletin.WaitForWord(3);
  processes.Signal(1, SIGKILL);
  ++bulletin.word();
  const std::vector<std::string> texts = processes.Join();
  CHECK(Contains(texts[0], kPrefix + NameOf(1, processes.pid(1)) + " died; " +
                               NameOf(0, processes.pid(0)) + " waited for " +
                               NameOf(1, processes.pid(1))));
  CHECK_EQ(texts[1], "[ended by signal 9]");
  CHECK(Contains(texts[2], NameOf(1, processes.pid(1)) + " died; "));
}

TEST(ADeathEndsASleepAndAWaitForASlot) {
  Bulletin bulletin;
  Processes processes(2, [&](int process) {
    const auto ranks = ConnectAs(process, bulletin, {0, 0, 1});
    ranks->Barrier(0, 0, Reason());
    ++bulletin.word();
    if (process == 1) Hang();
    AtOnce([&] { ranks->rank(1, 0, 2, 64).Wait(2, 0, Reason()); });
  });
  bulletin.WaitForWord(2);
  std::this_thread::sleep_for(std::chrono::milliseconds(50));
  processes.Signal(1, SIGKILL);
  CHECK_EQ(processes.Join()[0],
           kPrefix + "rank 2 (process 1, pid " + std::to_string(processes.pid(1)) +
               ") died; rank 1 (process 0, pid " + std::to_string(processes.pid(0)) +
               ") waited for chunk 0 of rank 2 (process 1, pid " +
               std::to_string(processes.pid(1)) + ")");
}

TEST(TheLeadersDeathEndsAWaitForTheOrder) {
  Bulletin bulletin;
  Processes processes(2, [&](int process) {
    const auto ranks = ConnectAs(process, bulletin, {0, 1});
    if (process == 0) Hang();
    ++bulletin.word();
    AtOnce([&] { ranks->WaitForLogEntry(0, Reason()); });
  });
  bulletin.WaitForWord(1);
  processes.Signal(0, SIGKILL);
  CHECK(Contains(processes.Join()[1], NameOf(0, processes.pid(0)) + " died; "));
}

TEST(AProcessThatCannotWatchItsPeersSaysWhy) {
  Bulletin bulletin;
  Processes processes(2, [&](int process) {
    if (process == 1) {
      const NoThreadStarts limit;
      ConnectAs(process, bulletin, {0, 1});
      return;
    }
    const auto ranks = ConnectAs(process, bulletin, {0, 1});
    AtOnce([&] { ranks->Barrier(0, 0, Reason()); });
  });
  const std::vector<std::string> texts = processes.Join();
  for (const std::string& text : texts) {
    CHECK(
        Contains(text, "CommunicatorError: jax_ub.tp: " + NameOf(1, processes.pid(1)) +
                           " failed: a thread cannot start: "));
  }
}

// A forked child keeps the connections and memory of the dead process open.
TEST(AProcessThatLeavesAChildBehindIsNamedAtOnce) {
  Bulletin bulletin;
  std::atomic<int>& child = bulletin.word();
  Processes processes(2, [&](int process) {
    const auto ranks = ConnectAs(process, bulletin, {0, 1});
    ranks->Barrier(0, 0, Reason());
    if (process == 1) {
      const pid_t pid = fork();
      if (pid == 0) Hang();
      child = pid;
      Hang();
    }
    CHECK_THROWS(AtOnce([&] { ranks->Barrier(0, 1, Reason()); }), " died; ");
    kill(child, SIGKILL);
  });
  bulletin.WaitForWord(1);
  processes.Signal(1, SIGKILL);
  CHECK_EQ(processes.Join()[0], "");
}

TEST(AForkedChildDoesNotUseItsParentsCommunicator) {
  Bulletin bulletin;
  Processes processes(2, [&](int process) {
    auto ranks = ConnectAs(process, bulletin, {0, 1});
    ranks->Barrier(0, 0, Reason());
    if (process == 1) {
      const pid_t pid = fork();
      if (pid == 0) {
        ranks->Poison(std::make_exception_ptr(Error("the child's")));
        ranks->Close();
        ranks.reset();
        _exit(7);
      }
      int status = 0;
      waitpid(pid, &status, 0);
      CHECK(WIFEXITED(status) && WEXITSTATUS(status) == 7);
    }
    ranks->Barrier(0, 1, Reason());
    CHECK(ranks->poison() == nullptr);
  });
  for (const std::string& text : processes.Join()) CHECK_EQ(text, "");
}

TEST(AProcessThatDiesAfterItsCallsFailsNoCall) {
  Bulletin bulletin;
  Processes processes(2, [&](int process) {
    const auto ranks = ConnectAs(process, bulletin, {0, 1});
    if (process == 1) {
      ranks->buffer(1, 0)[0] = std::byte{42};
      // The process arrives at the barrier, and does not wait for the other one.
      try {
        ranks->Barrier(0, 0, Reason(0));
      } catch (const DeadlineError&) {
      }
      kill(getpid(), SIGKILL);
    }
    while (!ranks->poison()) std::this_thread::yield();
    ranks->Barrier(0, 0, Reason());
    CHECK(ranks->buffer(1, 0)[0] == std::byte{42});
    CHECK_THROWS(std::rethrow_exception(ranks->poison()),
                 "CommunicatorError: jax_ub.tp: rank 1 (process 1, pid ");
    AtOnce([&] { ranks->Barrier(1, 0, Reason()); });
  });
  CHECK(Contains(processes.Join()[0], " died; "));
}

TEST(AProcessThatClosedFailsOnlyWaitsForIt) {
  Bulletin bulletin;
  Processes processes(3, [&](int process) {
    const auto ranks = ConnectAs(process, bulletin, {0, 1, 2});
    ranks->Barrier(0, 0, Reason());
    if (process == 1) {
      ranks->Close();
      ranks->Close();
      CHECK_THROWS(ranks->WaitForLogEntry(0, Reason()), "closed its communicator");
      ++bulletin.word();
      return;
    }
    bulletin.WaitForWord(1);
    // Both processes continue without the one that left.
    if (process == 0) {
      std::this_thread::sleep_for(std::chrono::milliseconds(20));
      ranks->AppendToCallLog({11, 0});
    } else {
      CHECK_EQ(ranks->WaitForLogEntry(0, Reason()).call_site, 11u);
    }
    CHECK(ranks->poison() == nullptr);
    AtOnce([&] { ranks->Barrier(1, 0, Reason()); });
  });
  const std::vector<std::string> texts = processes.Join();
  CHECK(Contains(texts[0],
                 kPrefix + NameOf(1, processes.pid(1)) +
                     " closed its communicator, as ub.destroy_ub and the end of a "
                     "program do; " +
                     NameOf(0, processes.pid(0)) + " waited for " +
                     NameOf(1, processes.pid(1))));
  CHECK_EQ(texts[1], "");
  CHECK(Contains(texts[2], "closed its communicator"));
}

TEST(AStoppedProcessIsNamedAtTheDeadlineAndFailsToo) {
  Bulletin bulletin;
  Processes processes(2, [&](int process) {
    const auto ranks = ConnectAs(process, bulletin, {0, 1});
    ranks->Barrier(0, 0, Reason());
    ++bulletin.word();
    if (process == 0) {
      bulletin.WaitForWord(3);
      try {
        ranks->Barrier(0, 1, Reason(0.3));
      } catch (const DeadlineError&) {
        ranks->Poison(std::current_exception());
        ranks->Close();  // at once, though the peer is stopped
        ++bulletin.word();
        throw;
      }
    }
    // The process continues after SIGCONT.
    ranks->WaitForLogEntry(0, Reason());
  });
  bulletin.WaitForWord(2);
  processes.Signal(1, SIGSTOP);
  // Waits until the process has stopped, not only until the signal is sent.
  int status = 0;
  waitpid(processes.pid(1), &status, WUNTRACED);
  ++bulletin.word();
  bulletin.WaitForWord(4);
  processes.Signal(1, SIGCONT);
  const std::vector<std::string> texts = processes.Join();
  CHECK_EQ(texts[0], kPrefix + NameOf(0, processes.pid(0)) + " waited 0.3 s for " +
                         NameOf(1, processes.pid(1)) +
                         " (it is stopped). JAX_UB_TIMEOUT_S sets the seconds.");
  CHECK_EQ(texts[1], texts[0]);
}

TEST(PoisonReachesAllWithItsReasonAndType) {
  for (const bool by_deadline : {false, true}) {
    Bulletin bulletin;
    Processes processes(4, [&](int process) {
      std::atomic<int> num_notified{0};
      const auto ranks = ConnectAs(process, bulletin, {0, 1, 1, 2, 3});
      ranks->Barrier(0, 0, Reason());
      if (process == 2) {
        std::this_thread::sleep_for(std::chrono::milliseconds(30));
        ranks->Poison(by_deadline
                          ? std::make_exception_ptr(DeadlineError("waited for long"))
                          : std::make_exception_ptr(std::bad_alloc()));
        ranks->Poison(std::make_exception_ptr(CommunicatorError("later")));
        bulletin.WaitForWord(3);
        return;
      }
      ranks->OnPoison([&](const std::exception_ptr&) { ++num_notified; });
      try {
        AtOnce([&] { ranks->Barrier(0, 1, Reason()); });
      } catch (const DeadlineError&) {
        CHECK(by_deadline);
        ++bulletin.word();
        throw;
      } catch (const CommunicatorError&) {
        CHECK(!by_deadline);
        ++bulletin.word();
        // Later waits throw the reason, too.
        CHECK_THROWS(ranks->Barrier(1, 0, Reason()), "bad_alloc");
        CHECK_THROWS(std::rethrow_exception(ranks->poison()), "bad_alloc");
        ranks->OnPoison([&](const std::exception_ptr&) { num_notified += 10; });
        ranks->Close();
        CHECK_EQ(num_notified.load(), 11);
        throw;
      }
    });
    const std::vector<std::string> texts = processes.Join();
    CHECK_EQ(texts[2], "");
    for (const int p : {0, 1, 3}) {
      CHECK_EQ(texts[p], "CommunicatorError: jax_ub.tp: rank 3 (process 2, pid " +
                             std::to_string(processes.pid(2)) + ") failed: " +
                             (by_deadline ? "waited for long" : "std::bad_alloc"));
    }
  }
}

}  // namespace
}  // namespace jax_ub

CHECK_MAIN()
