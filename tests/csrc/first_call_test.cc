// Tests the first call of a call site, where processes take different times to compile
// its program.
#include <signal.h>

#include <chrono>
#include <string>
#include <thread>
#include <vector>

#include "engine/cpu/call_sequencer.h"
#include "member.h"

namespace jax_ub {
namespace {

CallAttributes Sum(int num_ranks, Method method = Method::kDirect) {
  return Spanning(Op::kAllReduce, method, num_ranks);
}

void Has(const std::string& text, const std::string& part) {
  if (text.find(part) != std::string::npos) return;
  check::Fail(__FILE__, __LINE__, "'", text, "' lacks '", part, "'");
}

// One process compiles the program for longer than the timeout of calls.
TEST(TheFirstCallOfACallSiteHasALongerDeadline) {
  for (const int late : {0, 1, 2}) {
    Bulletin bulletin;
    Processes processes(3, [&](int process) {
      Member member(process, bulletin, {0, 1, 1, 2}, 0.3, 1 << 20, kLongS);
      CallSite site(Sum(4));
      CallSite ring(Sum(4, Method::kRingExchange), 1);
      for (CallSite* each : {&site, &ring}) {
        if (process == late) std::this_thread::sleep_for(std::chrono::seconds(1));
        member.CheckRun(*each, 1, {}, 1);
      }
      CHECK(!member.sequencer().failure());
      // Later calls have the short timeout.
      Arrays arrays(1);
      const auto calls = MakeCalls(site.attributes(), {}, arrays);
      if (process == late) {
        while (!member.sequencer().failure()) std::this_thread::yield();
      }
      Has(member.Begin(site, 2, calls)[0].Wait(), " waited 0.3 s for ");
    });
    for (const std::string& text : processes.Join()) CHECK_EQ(text, "");
  }
}

// The late process is executing another call, which it executes repeatedly.
TEST(TheLeaderMarksTheFirstCallOfACallSite) {
  Bulletin bulletin;
  Processes processes(2, [&](int process) {
    Member member(process, bulletin, {0, 1}, 0.3, 1 << 20, kLongS);
    CallSite known(Sum(2));
    CallSite compiled(Sum(2), 1);
    member.CheckRun(known, 1, {}, 1);
    Arrays arrays(1);
    const auto first = MakeCalls(compiled.attributes(), {}, arrays);
    const auto second = MakeCalls(known.attributes(), {}, arrays);
    std::vector<Outcome> outcomes;
    if (process == 0) outcomes.push_back(member.Begin(compiled, 1, first)[0]);
    outcomes.push_back(member.Begin(known, 2, second)[0]);
    if (process == 1) {
      std::this_thread::sleep_for(std::chrono::seconds(1));
      outcomes.push_back(member.Begin(compiled, 1, first)[0]);
    }
    for (Outcome& outcome : outcomes) CHECK_EQ(outcome.Wait(), "");
  });
  for (const std::string& text : processes.Join()) CHECK_EQ(text, "");
}

TEST(TheDeadlineOfAFirstCallNamesItsSetting) {
  Bulletin bulletin;
  Processes processes(2, [&](int process) {
    Member member(process, bulletin, {0, 1}, 0.1, 1 << 20, 0.3);
    CallSite site(Sum(2));
    Arrays arrays(1);
    const auto calls = MakeCalls(site.attributes(), {}, arrays);
    if (process == 1) {
      while (!member.sequencer().failure()) std::this_thread::yield();
    }
    const std::string text = member.Begin(site, 1, calls)[0].Wait();
    Has(text, " waited 0.3 s for rank 1 ");
    Has(text, "JAX_UB_FIRST_CALL_TIMEOUT_S sets the seconds.");
  });
  for (const std::string& text : processes.Join()) CHECK_EQ(text, "");
}

TEST(ADeathEndsTheWaitOfAFirstCallAtOnce) {
  for (const int victim : {0, 1}) {
    Bulletin bulletin;
    Processes processes(2, [&](int process) {
      Member member(process, bulletin, {0, 1}, 0.3, 1 << 20, kLongS);
      if (process == victim) {
        bulletin.WaitForWord(1);
        std::this_thread::sleep_for(std::chrono::milliseconds(500));
        raise(SIGKILL);
      }
      CallSite site(Sum(2));
      Arrays arrays(1);
      const auto calls = MakeCalls(site.attributes(), {}, arrays);
      Outcome outcome = member.Begin(site, 1, calls)[0];
      ++bulletin.word();
      const auto begin = std::chrono::steady_clock::now();
      Has(outcome.Wait(), "died");
      CHECK(SecondsSince(begin) < kAtOnceS);
    });
    const auto texts = processes.Join();
    CHECK_EQ(texts[victim], "[ended by signal 9]");
    CHECK_EQ(texts[1 - victim], "");
  }
}

}  // namespace
}  // namespace jax_ub

CHECK_MAIN()
