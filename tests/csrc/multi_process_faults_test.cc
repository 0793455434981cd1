// Tests failures of calls that span processes: which processes learn of a failure,
// when, and the text of the error.
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstring>
#include <latch>
#include <memory>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "call_maker.h"
#include "check.h"
#include "engine_calls.h"
#include "member.h"
#include "no_thread_starts.h"
#include "platform/error.h"
#include "processes.h"

namespace jax_ub {
namespace {

using jax_ub_test::Arrays;
using jax_ub_test::MakeCalls;
using jax_ub_test::NumWrong;
using jax_ub_test::Sizes;

const std::string kLabel = "matmul_reduce_scatter (ub_name 'test')";

CallAttributes Scatter(int num_ranks, Method method = Method::kDirect) {
  return Spanning(Op::kMatmulReduceScatter, method, num_ranks);
}

// Runs calls of the site until one fails; returns the error. Checks that calls before
// it are right, and that it fails soon.
std::string RunUntilFailure(Member& member, CallSite& site, double within_s) {
  for (int seed = 0;; ++seed) {
    Arrays arrays(seed);
    const auto calls = MakeCalls(site.attributes(), {}, arrays);
    const auto begin = std::chrono::steady_clock::now();
    auto outcomes = member.Begin(site, seed, calls);
    std::string text;
    for (Outcome& outcome : outcomes) {
      const std::string one = outcome.Wait();
      if (text.empty()) text = one;
    }
    CHECK(SecondsSince(begin) < within_s);
    if (!text.empty()) return text;
    CHECK_EQ(NumWrong(site.attributes(), calls, member.ranks()), 0);
  }
}

// Kills one of three processes during calls of this kind.
void KillDuringCalls(Op op, Method method, int victim, int delay_ms) {
  Bulletin bulletin;
  Processes processes(3, [&](int process) {
    Member member(process, bulletin, {0, 1, 1, 2});
    ++bulletin.word();
    CallSite site(Spanning(op, method, 4));
    throw std::runtime_error(RunUntilFailure(member, site, kAtOnceS));
  });
  bulletin.WaitForWord(3);
  std::this_thread::sleep_for(std::chrono::milliseconds(delay_ms));
  processes.Signal(victim, SIGKILL);
  const std::vector<std::string> texts = processes.Join();
  const std::string begin = "CommunicatorError: jax_ub." + std::string(OpName(op)) +
                            " (ub_name 'test'): rank";
  const std::string died = " (process " + std::to_string(victim) + ", pid " +
                           std::to_string(processes.pid(victim)) + ") died";
  for (int p = 0; p < 3; ++p) {
    if (p == victim || (texts[p].starts_with(begin) && Contains(texts[p], died)))
      continue;
    CHECK_EQ(texts[p], begin + died);
  }
}

TEST(ARankThatIsKilledAmidCallsIsNamedAtOnceByAll) {
  int round = 0;
  for (const Op op :
       {Op::kAllGatherMatmul, Op::kMatmulReduceScatter, Op::kMatmulAllReduce,
        Op::kAllReduce, Op::kBulkAllGather, Op::kBulkReduceScatter}) {
    for (const Method method :
         {Method::kDirect, Method::kRingExchange, Method::kPipeline}) {
      // The victim is any process, also the leader, after different delays.
      KillDuringCalls(op, method, round % 3, round * 7 % 20);
      ++round;
    }
  }
}

// Process 1 stays in call 0 for a long time, and reads the data of process 0 there.
// Process 0 fails in call 1, with call 2 queued, and must not overwrite these data.
TEST(NothingIsOverwrittenAfterAFailedCall) {
  Bulletin bulletin;
  Processes processes(2, [&](int process) {
    const auto ranks = ConnectAs(process, bulletin, {0, 1}, 1 << 16);
    const CallAttributes at = Spanning(Op::kAllGather, Method::kDirect, 2);
    Arrays arrays(1);
    std::vector<std::vector<RankCall>> calls;
    for (int call = 0; call < 3; ++call) calls.push_back(MakeCalls(at, {}, arrays));
    if (process == 1) {
      ranks->PublishSignature(0, Signature(at, calls[0][1]), "");
      ranks->Barrier(0, 0, {kLabel, 0, kLongS});
      ranks->WaitForLogEntry(2, {kLabel, 0, kLongS});
      ranks->Poison(std::make_exception_ptr(CommunicatorError("it failed")));
      bulletin.WaitForWord(1);
      const Tensor& read = calls[0][0].operands[0];
      CHECK(std::memcmp(ranks->buffer(0, 0), read.data, read.size_bytes()) == 0);
      return;
    }
    Engine& engine = NewEngine(kLongS, 1);
    engine.rendezvous().set_local_devices({100});
    const auto sequencer = engine.Join(ranks, {100, 101});
    ranks->OnPoison([](const std::exception_ptr&) {});
    CallSite site(at);
    CHECK_EQ(Submit(engine, site, 0, 100, calls[0][0]).Wait(), "");
    Outcome failed = Submit(engine, site, 1, 100, calls[1][0]);
    // The call must begin before it fails; otherwise no thread would fail it.
    while (sequencer->num_calls() < 2) std::this_thread::yield();
    Submit(engine, site, 2, 100, calls[2][0]);
    CHECK(Contains(failed.Wait(), "it failed"));
    std::this_thread::sleep_for(std::chrono::milliseconds(100));
    CHECK_EQ(sequencer->num_calls(), 2);
    ++bulletin.word();
    engine.Leave(sequencer);
  });
  for (const std::string& text : processes.Join()) CHECK_EQ(text, "");
}

// Each process has one thread for all its ranks, the first of its thread pool.
TEST(AtTheLimitOfThreadsCallsEnd) {
  InProcesses(
      {0, 1, 0, 1},
      [](Member& member) {
        Arrays arrays(1);
        CallSite concurrent(Spanning(Op::kBulkAllGather, Method::kDirect, 4));
        const auto calls = MakeCalls(concurrent.attributes(), {}, arrays);
        std::vector<Outcome> outcomes;
        const auto begin = [&](int rank) {
          outcomes.push_back(
              Submit(member.engine(), concurrent, 1, 100 + rank, calls[rank]));
        };
        begin(member.ranks()[0]);  // with which the watchdog starts
        const NoThreadStarts limit;
        begin(member.ranks()[1]);
        for (Outcome& outcome : outcomes) CHECK_EQ(outcome.Wait(), "");
        CHECK_EQ(NumWrong(concurrent.attributes(), calls, member.ranks()), 0);
        // Ranks that wait for each other cannot run in sequence.
        CallSite waiting(Spanning(Op::kBulkAllGather, Method::kRingExchange, 4));
        const auto others = MakeCalls(waiting.attributes(), {}, arrays);
        for (Outcome& outcome : member.Begin(waiting, 1, others)) {
          const std::string text = outcome.Wait();
          CHECK(Contains(text, " waited 3 s for chunk "));
          CHECK(Contains(text, "Only 1 of 2 ranks found a thread: is the limit of "));
        }
      },
      3);
}

// Such threads run the rest of a program, whose host callbacks may start processes.
TEST(ThreadsThatStartByAFailureTakeSignals) {
  Bulletin bulletin;
  Processes processes(2, [&](int process) {
    Member member(process, bulletin, {0, 1});
    if (process == 1) {
      bulletin.WaitForWord(1);  // until all calls are there: later ones are refused
      member.sequencer().Fail(std::make_exception_ptr(CommunicatorError("it failed")));
      return;
    }
    member.engine().pool().set_num_threads(4);
    constexpr int kNumCalls = 8;
    CallSite site(Scatter(2));
    Arrays arrays(1);
    const auto calls = MakeCalls(site.attributes(), {}, arrays);
    const auto done = std::make_shared<std::latch>(kNumCalls);
    const auto num_blocking = std::make_shared<std::atomic<int>>(0);
    for (int run = 0; run < kNumCalls; ++run) {
      member.engine().Submit(site, run, 100, calls[0],
                             [done, num_blocking](const std::exception_ptr&) {
                               sigset_t blocked;
                               pthread_sigmask(SIG_BLOCK, nullptr, &blocked);
                               *num_blocking += sigismember(&blocked, SIGTERM);
                               done->count_down();
                             });
    }
    ++bulletin.word();
    done->wait();
    CHECK_EQ(num_blocking->load(), 0);
  });
  for (const std::string& text : processes.Join()) CHECK_EQ(text, "");
}

TEST(ARankThatDiedBeforeACallIsNamedByTheCall) {
  Bulletin bulletin;
  Processes processes(2, [&](int process) {
    Member member(process, bulletin, {0, 1});
    CallSite site(Scatter(2));
    member.CheckRun(site, 1, {}, 1);
    if (process == 1) kill(getpid(), SIGKILL);
    while (!member.sequencer().failure()) std::this_thread::yield();
    Arrays arrays(2);
    const auto calls = MakeCalls(site.attributes(), {}, arrays);
    AtOnce([&] { throw std::runtime_error(member.Begin(site, 2, calls)[0].Wait()); });
  });
  const std::string text = processes.Join()[0];
  CHECK(Contains(text, "CommunicatorError: jax_ub." + kLabel + ": "));
  CHECK(Contains(text, NameOf(1, processes.pid(1)) + " died"));
}

TEST(ARankThatDiesAfterItsLastCallFailsNoCall) {
  for (int round = 0; round < 10; ++round) {
    Bulletin bulletin;
    Processes processes(2, [&](int process) {
      Member member(process, bulletin, {0, 1});
      CallSite site(Spanning(Op::kAllGatherMatmul, Method::kDirect, 2));
      for (int call = 0; call < 20; ++call) {
        // The last call is late: the peer has finished and is dead by then.
        if (process == 0 && call == 19) {
          std::this_thread::sleep_for(std::chrono::milliseconds(5));
        }
        if (process == 1 && call == 19) {
          Arrays arrays(call);
          const auto calls = MakeCalls(site.attributes(), {}, arrays);
          if (member.Begin(site, call, calls)[0].Wait().empty())
            kill(getpid(), SIGKILL);
          throw std::runtime_error("failed");
        }
        member.CheckRun(site, call, {}, call);
      }
    });
    CHECK_EQ(processes.Join()[0], "");
  }
}

TEST(AStoppedRankIsNamedAtTheDeadlineAndFailsToo) {
  Bulletin bulletin;
  Processes processes(2, [&](int process) {
    Member member(process, bulletin, {0, 1}, 2);
    ++bulletin.word();
    CallSite site(Scatter(2));
    const std::string text = RunUntilFailure(member, site, kAtOnceS);
    ++bulletin.word();
    throw std::runtime_error(text);
  });
  bulletin.WaitForWord(2);
  std::this_thread::sleep_for(std::chrono::milliseconds(5));
  processes.Signal(1, SIGSTOP);
  waitpid(processes.pid(1), nullptr, WUNTRACED);
  bulletin.WaitForWord(3);  // process 0 has failed
  processes.Signal(1, SIGCONT);
  const std::vector<std::string> texts = processes.Join();
  CHECK_EQ(texts[0], "CommunicatorError: jax_ub." + kLabel + ": " +
                         NameOf(0, processes.pid(0)) + " waited 2 s for " +
                         NameOf(1, processes.pid(1)) +
                         " (it is stopped). JAX_UB_TIMEOUT_S sets the seconds.");
  CHECK_EQ(texts[1], texts[0]);
}

TEST(ARankThatNeverCallsIsNamedAtTheDeadline) {
  for (const int missing : {0, 1, 2}) {
    Bulletin bulletin;
    Processes processes(3, [&](int process) {
      Member member(process, bulletin, {0, 1, 2}, 0.3);
      CallSite site(Scatter(3));
      // The leader submits first, because the others wait for its order of calls.
      const int num_first = missing == 0 ? 0 : 1;
      if (process != missing) {
        Arrays arrays(1);
        const auto calls = MakeCalls(site.attributes(), {}, arrays);
        if (process != 0) bulletin.WaitForWord(num_first);
        Outcome outcome = member.Begin(site, 1, calls)[0];
        if (process == 0) ++bulletin.word();
        const std::string text = outcome.Wait();
        ++bulletin.word();
        throw std::runtime_error(text);
      }
      bulletin.WaitForWord(2 + num_first);
      // The process's own call, much later, fails at once.
      while (!member.sequencer().failure()) std::this_thread::yield();
      AtOnce([&] {
        Arrays arrays(1);
        const auto calls = MakeCalls(site.attributes(), {}, arrays);
        throw std::runtime_error(member.Begin(site, 1, calls)[0].Wait());
      });
    });
    for (const std::string& text : processes.Join()) {
      CHECK(Contains(text, "CommunicatorError: jax_ub." + kLabel + ": rank "));
      CHECK(Contains(text, " waited 0.3 s for "));
      CHECK(Contains(text, NameOf(missing, processes.pid(missing))));
    }
  }
}

TEST(DifferentShapesAreAnErrorOnEveryRankThatNamesBoth) {
  for (const int odd : {0, 1, 2}) {
    Bulletin bulletin;
    Processes processes(3, [&](int process) {
      Member member(process, bulletin, {0, 1, 2});
      CallSite site(Scatter(3));
      member.CheckRun(site, 1, {}, 1);
      Sizes sizes;
      if (process == odd) sizes.k = 9;
      Arrays arrays(2);
      const auto calls = MakeCalls(site.attributes(), sizes, arrays);
      const std::string text = member.Begin(site, 2, calls)[0].Wait();
      // The failure is permanent.
      Arrays later(3);
      CHECK(!member.Begin(site, 3, MakeCalls(site.attributes(), {}, later))[0]
                 .Wait()
                 .empty());
      throw std::runtime_error(text);
    });
    const std::vector<std::string> texts = processes.Join();
    for (const std::string& text : texts) {
      CHECK_EQ(text, texts[0]);
      CHECK(Contains(text, "CommunicatorError: jax_ub." + kLabel + ": "));
      CHECK(Contains(text, "do not agree"));
      CHECK(Contains(text, "15, 7]"));
      CHECK(Contains(text, "15, 9]"));
    }
  }
}

// One process throws for an operand that only its own call rejects.
TEST(ACallThatOneRankRefusesFailsOnAll) {
  for (const int odd : {0, 1}) {
    Bulletin bulletin;
    Processes processes(2, [&](int process) {
      Member member(process, bulletin, {0, 1});
      CallSite site(Scatter(2));
      Arrays arrays(2);
      auto calls = MakeCalls(site.attributes(), {}, arrays);
      if (process == odd) calls[process].operands[1].rows += 1;
      AtOnce([&] { throw std::runtime_error(member.Begin(site, 2, calls)[0].Wait()); });
    });
    for (const std::string& text : processes.Join()) {
      CHECK(Contains(text, "jax_ub." + kLabel));
      CHECK(!Contains(text, "waited"));
    }
  }
}

TEST(ACallOfTooManySlotsIsRefusedAndTheNextOneRuns) {
  InProcesses({0, 1}, [](Member& member) {
    CallAttributes at = Spanning(Op::kAllReduce, Method::kPipeline, 2);
    at.num_splits = 5000;
    CallSite site(at);
    Arrays arrays(1);
    const auto calls = MakeCalls(at, {}, arrays);
    CHECK(Contains(
        member.Begin(site, 1, calls)[0].Wait(),
        "jax_ub.all_reduce (ub_name 'test'): all_reduce with num_splits 5000 needs "
        "10000 slots, and communicator 'tp' has flags for 4096: give the name fewer "
        "num_splits"));
    at.num_splits = 0;
    CallSite next(at);
    member.CheckRun(next, 2, {}, 2);
    CHECK(!member.sequencer().failure());
  });
}

// No process waits for the rejected call, and the communicator stays usable.
TEST(ACallThatWasLoweredForAnEarlierCommunicatorIsRefused) {
  InProcesses({0, 1}, [](Member& member) {
    CallAttributes earlier = Scatter(2);
    earlier.generation = member.sequencer().generation() - 1;
    CallSite stale(earlier);
    Arrays arrays(1);
    const auto calls = MakeCalls(earlier, {}, arrays);
    for (Outcome& outcome : member.Begin(stale, 1, calls)) {
      CHECK(Contains(outcome.Wait(), "traced for an earlier communicator"));
    }
    // Another group of the call may have a newer communicator.
    for (int newer = 0; newer < 2; ++newer) {
      CallAttributes current = Scatter(2);
      current.generation = member.sequencer().generation() + newer;
      CallSite site(current);
      member.CheckRun(site, 1 + newer, {}, 1);
    }
  });
}

TEST(ANewCommunicatorGoesOnWhereOneFailed) {
  Bulletin bulletin;
  Processes processes(2, [&](int process) {
    Engine& engine = NewEngine(kLongS, 1);
    engine.rendezvous().set_local_devices({100 + process});
    for (int round = 1; round <= 10; ++round) {
      const auto sequencer = engine.Join(
          ConnectAs(process, bulletin, {0, 1}, 1 << 16, 20, round), {100, 101});
      CallSite site(Scatter(2));
      Arrays arrays(round);
      const auto calls = MakeCalls(site.attributes(), {}, arrays);
      const std::string text =
          Submit(engine, site, round, 100 + process, calls[process]).Wait();
      CHECK_EQ(text, "");
      CHECK_EQ(NumWrong(site.attributes(), calls, {process}), 0);
      if (process == round % 2) {
        sequencer->Fail(std::make_exception_ptr(
            CommunicatorError("CommunicatorError: jax_ub.x: raised in Python")));
      }
      CHECK_EQ(Submit(engine, site, round + 100, 100 + process, calls[process]).Wait(),
               "CommunicatorError: jax_ub.x: raised in Python");
      engine.Leave(sequencer);
    }
  });
  for (const std::string& text : processes.Join()) CHECK_EQ(text, "");
}

}  // namespace
}  // namespace jax_ub

CHECK_MAIN()
