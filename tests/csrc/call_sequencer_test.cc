// Tests calls of groups that span several processes: how calls are matched, in which
// order they run, and how they end if a process is missing, disagrees, fails or dies.
#include "engine/cpu/call_sequencer.h"

#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <memory>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "member.h"
#include "platform/error.h"
#include "scaled_calls.h"

namespace jax_ub {
namespace {

CallAttributes Sum(int num_ranks, Method method = Method::kDirect) {
  return Spanning(Op::kAllReduce, method, num_ranks);
}

bool Has(const std::string& text, const std::string& part) {
  if (text.find(part) != std::string::npos) return true;
  check::Fail(__FILE__, __LINE__, "'", text, "' lacks '", part, "'");
  return false;
}

// One execution of a call site: the calls of all ranks, which are equal in every
// process.
struct Execution {
  CallSite* site = nullptr;
  int64_t run_id = 0;
  std::vector<RankCall> calls;
};

// Every process begins all executions, in a different random order, and checks its
// results.
void RunShuffled(Member& member, const std::vector<Execution>& executions, int seed) {
  std::vector<size_t> order(executions.size());
  for (size_t i = 0; i < order.size(); ++i) order[i] = i;
  std::shuffle(order.begin(), order.end(), std::mt19937(seed));
  std::vector<std::vector<Outcome>> outcomes(executions.size());
  for (const size_t i : order) {
    outcomes[i] =
        member.Begin(*executions[i].site, executions[i].run_id, executions[i].calls);
  }
  for (size_t i = 0; i < executions.size(); ++i) {
    for (Outcome& outcome : outcomes[i]) CHECK_EQ(outcome.Wait(), "");
    CHECK_EQ(
        NumWrong(executions[i].site->attributes(), executions[i].calls, member.ranks()),
        0);
  }
}

TEST(IndependentCallsRunInTheLeadersOrder) {
  InProcesses({0, 1, 1, 2}, [](Member& member) {
    constexpr int kNumSites = 24;
    std::vector<std::unique_ptr<CallSite>> sites;
    for (int i = 0; i < kNumSites; ++i) {
      CallAttributes at =
          Spanning(static_cast<Op>(i % 2 == 0 ? 5 : 7),
                   i % 3 == 0 ? Method::kRingExchange : Method::kDirect, 4);
      at.channel = "jit_step/" + std::to_string(i / 2);
      sites.push_back(std::make_unique<CallSite>(at, i % 2));
    }
    for (int64_t run = 0; run < 10; ++run) {
      Arrays arrays(static_cast<int>(run));
      std::vector<Execution> executions;
      for (const auto& site : sites) {
        executions.push_back(
            {site.get(), run, MakeCalls(site->attributes(), {}, arrays)});
      }
      const int process = member.sequencer().communicator().process();
      RunShuffled(member, executions, static_cast<int>(100 * run) + process);
    }
  });
}

TEST(LaunchesOfOneProgramMayOvertakeEachOther) {
  InProcesses({0, 1}, [](Member& member) {
    CallSite site(Sum(2));
    Arrays arrays(1);
    std::vector<Execution> executions;
    for (int64_t run = -3; run < 30; ++run) {
      executions.push_back({&site, run, MakeCalls(site.attributes(), {}, arrays)});
    }
    RunShuffled(member, executions, member.sequencer().communicator().process());
  });
}

// A loop executes the same call site repeatedly, in the same order on every device.
TEST(ExecutionsOfALoopMatch) {
  InProcesses({0, 1}, [](Member& member) {
    CallSite site(Sum(2));
    Arrays arrays(1);
    std::vector<std::vector<RankCall>> rounds;
    std::vector<Outcome> outcomes;
    for (int i = 0; i < 40; ++i) {
      rounds.push_back(MakeCalls(site.attributes(), {}, arrays));
      outcomes.push_back(member.Begin(site, 3, rounds.back())[0]);
    }
    for (Outcome& outcome : outcomes) CHECK_EQ(outcome.Wait(), "");
    for (const auto& calls : rounds) {
      CHECK_EQ(NumWrong(site.attributes(), calls, member.ranks()), 0);
    }
  });
}

// The processes' run ids differ if one of them loads a program from the compilation
// cache.
TEST(RunIdsOfAnotherOriginAreConverted) {
  InProcesses({0, 1, 2}, [](Member& member) {
    const int process = member.sequencer().communicator().process();
    const int64_t origin = process == 0 ? 2147483640 : -1000000000 * process;
    std::vector<std::unique_ptr<CallSite>> sites;
    for (uint64_t i = 0; i < 3; ++i) {
      sites.push_back(std::make_unique<CallSite>(Sum(3), i));
    }
    Arrays arrays(1);
    for (int run = 0; run < 20; ++run) {
      std::vector<Execution> executions;
      for (const auto& site : sites) {
        // Run ids have 32 bits and wrap around.
        const auto id = static_cast<int32_t>(static_cast<uint32_t>(origin + run));
        executions.push_back(
            {site.get(), id, MakeCalls(site->attributes(), {}, arrays)});
      }
      RunShuffled(member, executions, 10 * run + process);
    }
  });
}

TEST(TwoProgramsThatCannotBeDistinguishedAreRejected) {
  InProcesses({0, 1}, [](Member& member) {
    const bool is_leader = member.sequencer().communicator().is_leader();
    CallSite one(Sum(2));
    CallSite other(Sum(2));
    Arrays arrays(1);
    const auto calls = MakeCalls(one.attributes(), {}, arrays);
    if (is_leader) {
      Has(member.Begin(one, 5, calls)[0].Wait(), "so their calls cannot be matched");
      return;
    }
    // Both calls arrive before the call sequencer looks for them.
    RunIdOffsets alignment;
    std::deque<std::shared_ptr<CollectiveCall>> complete;
    for (const CallSite* site : {&one, &other}) {
      auto collective = std::make_shared<CollectiveCall>();
      collective->attributes = &site->attributes();
      collective->call_site_key = 77;
      collective->call_site_id = complete.size();
      collective->run_id = 1000000000 + static_cast<int64_t>(complete.size());
      complete.push_back(std::move(collective));
    }
    try {
      alignment.Find({77, uint64_t{5} << 32}, complete);
      CHECK(false);
    } catch (const CommunicatorError& error) {
      Has(error.what(), "two programs with the channel 'jit_test/1' run concurrently");
      member.sequencer().Fail(std::current_exception());
    }
  });
}

TEST(TheOffsetOfRunIdsIsLearnedOnce) {
  CallAttributes at = Sum(2);
  RunIdOffsets alignment;
  const auto collective = [&](int64_t run) {
    auto made = std::make_shared<CollectiveCall>();
    made->attributes = &at;
    made->call_site_key = 7;
    made->run_id = run;
    return made;
  };
  const auto order = [](uint32_t run) { return CallLogEntry{7, uint64_t{run} << 32}; };
  const auto first = collective(500000000);
  CHECK(alignment.Find(order(10), {first}) == first);
  // A call that is one launch later in this process does not match, nor one that is one
  // launch earlier.
  CHECK(alignment.Find(order(11), {collective(500000002)}) == nullptr);
  CHECK(alignment.Find(order(12), {collective(500000001)}) == nullptr);
  const auto third = collective(500000002);
  CHECK(alignment.Find(order(12), {third}) == third);
  // If the run ids have one origin, only the same launch matches.
  RunIdOffsets near;
  CHECK(near.Find(order(11), {collective(10)}) == nullptr);
  const auto same = collective(11);
  CHECK(near.Find(order(11), {collective(10), same}) == same);
}

TEST(ProcessesThatDisagreeAllNameBothCalls) {
  InProcesses({0, 1, 1}, [](Member& member) {
    const bool is_leader = member.sequencer().communicator().is_leader();
    CallSite site(Sum(3));
    Arrays arrays(1);
    const auto calls =
        MakeCalls(site.attributes(), is_leader ? Sizes{} : Sizes{2, 6, 7, 3}, arrays);
    for (Outcome& outcome : member.Begin(site, is_leader ? 1 : 1 << 30, calls)) {
      const std::string text = outcome.Wait();
      Has(text,
          "CommunicatorError: jax_ub.all_reduce (ub_name 'test'): rank 0 (process "
          "0, pid ");
      Has(text, ") and ranks 1, 2 (process 1, pid ");
      Has(text,
          ") do not agree: all_reduce (ub_name 'test'): all_reduce by direct of "
          "f32[35, 1] to f32[35, 1], num_ranks 3");
      Has(text,
          "; and all_reduce (ub_name 'test'): all_reduce by direct of f32[42, 1] "
          "to f32[42, 1], num_ranks 3");
    }
    // The failure is permanent: a later call fails at once.
    const auto later = MakeCalls(site.attributes(), {}, arrays);
    Has(member.Begin(site, 2, later)[0].Wait(), "do not agree");
    CHECK(member.engine().counters().failed_calls > 0);
  });
}

TEST(MethodsAndOptionsAreComparedToo) {
  const auto run = [](const std::function<void(CallAttributes&)>& change,
                      const std::string& wanted) {
    InProcesses({0, 1}, [&](Member& member) {
      CallAttributes at = Sum(2);
      if (!member.sequencer().communicator().is_leader()) change(at);
      CallSite site(at);
      Arrays arrays(1);
      Has(member.Begin(site, 1, MakeCalls(Sum(2), {}, arrays))[0].Wait(), wanted);
    });
  };
  run([](CallAttributes& at) { at.method = Method::kRingExchange; },
      "all_reduce by ring_exchange of");
  run([](CallAttributes& at) { at.num_splits = 3; }, "num_splits 3");
  run([](CallAttributes& at) { at.variant = Variant::kAggregate; },
      "all_reduce by direct, aggregate of");
  run([](CallAttributes& at) { at.label = "other"; }, "; and other: all_reduce");
}

TEST(RanksWithDifferentRecipesFailAndNameBoth) {
  InProcesses({0, 1}, [](Member& member) {
    const bool is_leader = member.sequencer().communicator().is_leader();
    CallAttributes at = Spanning(Op::kAllGatherMatmul, Method::kDirect, 2);
    at.has_scales = true;
    at.has_row_scales = is_leader;
    CallSite site(at);
    Arrays arrays(1);
    const auto kind = is_leader ? ScaleKind::kBlocks : ScaleKind::kTensor;
    const auto made = MakeScaledCalls(at, kBlockSizes, kind, false, arrays);
    const std::string text = member.Begin(site, 1, made.calls)[0].Wait();
    Has(text, "jax_ub.all_gather_matmul (ub_name 'test'): rank 1 (process 1, pid ");
    Has(text, ") scales per tensor, rank 0 (process 0, pid ");
    Has(text, ") per block. Pass the same recipe on all ranks");
  });
}

TEST(ARankThatIsRefusedFailsTheOthers) {
  InProcesses({0, 1}, [](Member& member) {
    CallSite site(Sum(2));
    Arrays arrays(1);
    auto calls = MakeCalls(site.attributes(), {}, arrays);
    calls[1].results[0] = arrays.Empty(1, 1, 1);
    Has(member.Begin(site, 1, calls)[0].Wait(),
        "the communicated result is f32[1, 1], expected f32[35, 1]");
  });
}

TEST(LocalRanksThatDisagreeFailTheOthers) {
  InProcesses({0, 1, 1}, [](Member& member) {
    CallSite site(Sum(3));
    Arrays arrays(1);
    auto calls = MakeCalls(site.attributes(), {}, arrays);
    calls[2] = MakeCalls(site.attributes(), {2, 6, 7, 3}, arrays)[2];
    for (Outcome& outcome : member.Begin(site, 1, calls)) {
      Has(outcome.Wait(),
          "ranks 1 and 2 do not agree: operand 0 is f32[35, 1] and "
          "f32[42, 1], respectively");
    }
  });
}

TEST(AMissingLocalRankFailsEveryProcess) {
  Bulletin bulletin;
  Processes processes(2, [&](int process) {
    // Rank 2 is missing in process 0; the other process has a later deadline.
    Member member(process, bulletin, {0, 1, 0}, process == 0 ? 0.3 : kLongS);
    CallSite site(Sum(3));
    Arrays arrays(1);
    const auto calls = MakeCalls(site.attributes(), {}, arrays);
    const std::string text =
        Submit(member.engine(), site, 1, 100 + process, calls[process]).Wait();
    Has(text,
        "all_reduce of group 0 waited 0.3 s for rank(s) 2 of 3; waiting: "
        "rank(s) 0 (run 1, execution 0)");
    if (process != 0) return;
    CHECK_EQ(Submit(member.engine(), site, 1, 102, calls[2]).Wait(), text);
  });
  for (const std::string& text : processes.Join()) CHECK_EQ(text, "");
}

TEST(AMissingProcessFailsTheOthersAtTheDeadline) {
  for (const int missing : {0, 1}) {
    InProcesses(
        {0, 1},
        [&](Member& member) {
          CallSite site(Sum(2));
          Arrays arrays(1);
          const auto calls = MakeCalls(site.attributes(), {}, arrays);
          if (member.sequencer().communicator().process() != missing) {
            const auto begin = std::chrono::steady_clock::now();
            const std::string text = member.Begin(site, 1, calls)[0].Wait();
            CHECK(SecondsSince(begin) >= 0.3);
            Has(text, "CommunicatorError: jax_ub.all_reduce (ub_name 'test'): rank " +
                          std::to_string(1 - missing) + " (process ");
            Has(text, "waited 0.3 s for rank " + std::to_string(missing));
            return;
          }
          while (!member.sequencer().failure()) std::this_thread::yield();
          // The late call fails at once, with the reason of the other process.
          Has(member.Begin(site, 1, calls)[0].Wait(), "waited 0.3 s for rank");
        },
        0.3);
  }
}

// Either process may reach its deadline first; processes publish calls after a second.
TEST(AMissingCallIsNamedWithTheSubmittedCalls) {
  for (const int first : {0, 1}) {
    Bulletin bulletin;
    Processes processes(2, [&](int process) {
      Member member(process, bulletin, {0, 1}, process == first ? 2.5 : kLongS);
      CallAttributes at = Sum(2);
      at.channel = process == 0 ? "jit_a/2" : "jit_b/2";
      CallSite site(at);
      Arrays arrays(1);
      const auto calls = MakeCalls(at, {}, arrays);
      if (process == 1) bulletin.WaitForWord(1);  // the leader has said which call
      Outcome outcome = member.Begin(site, 1, calls)[0];
      ++bulletin.word();
      const std::string text = outcome.Wait();
      if (first == 0) {
        Has(text, "waited 2.5 s for rank 1 (process 1");
        Has(text,
            ") (it has submitted other calls: all_reduce (ub_name 'test') (jit_b/2); "
            "run the same program");
        return;
      }
      Has(text,
          "waited 2.5 s for the local ranks of call 0, which the leader has started ");
      Has(text, "run 1, execution 0): all_reduce (ub_name 'test'): all_reduce by ");
      Has(text,
          ". Submitted here: all_reduce (ub_name 'test') (jit_b/2). "
          "Run the same program");
    });
    for (const std::string& text : processes.Join()) CHECK_EQ(text, "");
  }
}

TEST(AProcessThatDiesFailsTheOthersAtOnce) {
  Bulletin bulletin;
  Processes processes(3, [&](int process) {
    Member member(process, bulletin, {0, 1, 2});
    CallSite site(Sum(3));
    member.CheckRun(site, 1, {}, 1);
    Arrays arrays(1);
    const auto calls = MakeCalls(site.attributes(), {}, arrays);
    if (process == 1) {
      bulletin.WaitForWord(2);
      raise(SIGKILL);
    }
    std::vector<Outcome> outcomes = member.Begin(site, 2, calls);
    ++bulletin.word();
    const auto begin = std::chrono::steady_clock::now();
    Has(outcomes[0].Wait(), "rank 1 (process 1, pid ");
    CHECK(SecondsSince(begin) < kAtOnceS);
    Has(member.Begin(site, 3, calls)[0].Wait(), "rank 1 (process 1, pid ");
  });
  const auto texts = processes.Join();
  CHECK_EQ(texts[0], "");
  CHECK_EQ(texts[1], "[ended by signal 9]");
  CHECK_EQ(texts[2], "");
}

TEST(ACallThatDoesNotFitIsRefusedAndTheNextOneRuns) {
  InProcesses(
      {0, 1},
      [](Member& member) {
        CallSite site(Spanning(Op::kMatmulReduceScatter, Method::kDirect, 2));
        CallSite ring(Spanning(Op::kMatmulReduceScatter, Method::kRingExchange, 2));
        CallSite none(Spanning(Op::kMatmulReduceScatter, Method::kBulk, 2));
        Arrays arrays(1);
        const Sizes large = {1, 640, 8, 40};
        const auto calls = MakeCalls(site.attributes(), large, arrays);
        Has(member.Begin(site, 1, calls)[0].Wait(),
            "CommunicatorError: jax_ub.matmul_reduce_scatter (ub_name 'test'): the "
            "call "
            "needs 204800 bytes per rank, and communicator 'tp' has 98304. Give "
            "initialize_ub a shape [T, H] with T * H of at least 17408");
        Has(member.Begin(ring, 1, calls)[0].Wait(), "the call needs 102400 bytes");
        Has(member.Begin(none, 1, MakeCalls(site.attributes(), {}, arrays))[0].Wait(),
            "has no method bulk: use direct");
        member.CheckRun(site, 2, {}, 2);
        member.CheckRun(ring, 2, {}, 2);
        CHECK(!member.sequencer().failure());
      },
      kLongS, 96 << 10);
}

TEST(ClosingFailsWhatIsPending) {
  InProcesses({0, 1}, [](Member& member) {
    if (!member.sequencer().communicator().is_leader()) return;
    CallSite site(Sum(2));
    Arrays arrays(1);
    const auto calls = MakeCalls(site.attributes(), {}, arrays);
    Outcome pending = member.Begin(site, 1, calls)[0];
    member.Leave();
    Has(pending.Wait(), "closed its communicator");
    Has(member.Begin(site, 2, calls)[0].Wait(),
        "devices 100, 101 belong to several processes, and no communicator connects "
        "them: "
        "call ub.initialize_ub");
  });
}

TEST(AProcessThatHasClosedHasCompletedItsCalls) {
  InProcesses({0, 1}, [](Member& member) {
    CallSite site(Sum(2));
    for (int run = 0; run < 20; ++run) member.CheckRun(site, run, {}, run);
    if (member.sequencer().communicator().is_leader()) return;
    Arrays arrays(1);
    const auto calls = MakeCalls(site.attributes(), {}, arrays);
    Has(member.Begin(site, 20, calls)[0].Wait(), "rank 0 (process 0, pid ");
  });
}

// The parent's atexit handlers run in the child as well.
TEST(AForkedChildSendsNoCloseForItsParent) {
  InProcesses({0, 1}, [](Member& member) {
    CallSite site(Sum(2));
    member.CheckRun(site, 1, {}, 1);
    const pid_t pid = fork();
    if (pid == 0) {
      member.sequencer().Close();
      _exit(0);
    }
    int status = -1;
    waitpid(pid, &status, 0);
    CHECK_EQ(status, 0);
    member.CheckRun(site, 2, {}, 2);
  });
}

TEST(DevicesAreConnectedOnce) {
  Bulletin bulletin;
  Processes processes(2, [&](int process) {
    Member member(process, bulletin, {0, 1});
    auto again = ConnectAs(process, bulletin, {0, 1}, 4096, 20, 2);
    CHECK_THROWS(
        member.engine().Join(again, {100, 101}),
        "the devices of communicator 'tp' are connected already, by 'tp': close "
        "that one first");
    member.engine().Leave(member.engine().Join(again, {101, 100}));
  });
  for (const std::string& text : processes.Join()) CHECK_EQ(text, "");
}

TEST(AGroupOfOneProcessNeedsNoCommunicator) {
  InProcesses({0, 1}, [](Member& member) {
    const int64_t own = 100 + member.ranks()[0];
    CallAttributes at = Sum(2);
    at.ranks = {own, 300, 201 - own, 301};
    member.engine().rendezvous().set_local_devices({own, 300});
    CallSite site(at);
    Arrays arrays(1);
    const auto calls = MakeCalls(at, {}, arrays);
    Outcome first = Submit(member.engine(), site, 1, own, calls[0]);
    Outcome second = Submit(member.engine(), site, 1, 300, calls[1]);
    CHECK_EQ(first.Wait(), "");
    CHECK_EQ(second.Wait(), "");
    CHECK_EQ(NumWrong(at, calls), 0);
  });
}

TEST(OrdinalsBeginWithALowering) {
  Rendezvous& rendezvous = NewEngine().rendezvous();
  CHECK_EQ(rendezvous.NextOrdinal("jit_f/2"), uint64_t{0});
  CHECK_EQ(rendezvous.NextOrdinal("jit_f/2"), uint64_t{1});
  CHECK_EQ(rendezvous.NextOrdinal("jit_f/3"), uint64_t{0});
  rendezvous.BeginProgram("jit_f/2");
  CHECK_EQ(rendezvous.NextOrdinal("jit_f/2"), uint64_t{0});
  CHECK_EQ(rendezvous.NextOrdinal("jit_f/3"), uint64_t{1});
}

}  // namespace
}  // namespace jax_ub

CHECK_MAIN()
