// Tests calls of processes that are stopped for longer than the timeout and then
// continue, as after Ctrl-Z and fg.
#include <signal.h>

#include <chrono>
#include <string>
#include <thread>

#include "member.h"

namespace jax_ub {
namespace {

constexpr double kTimeoutS = 4;
constexpr std::chrono::seconds kStop{6};

// A process with all ranks. Rank 1 arrives after the stop.
void RunAlone(Bulletin& bulletin) {
  Engine& engine = NewEngine(kTimeoutS);
  CallSite site(MakeAttributes(Op::kAllReduce, Method::kDirect, 2));
  Arrays arrays(1);
  const auto calls = MakeCalls(site.attributes(), {}, arrays);
  Outcome first = Submit(engine, site, 1, 100, calls[0]);
  ++bulletin.word();
  bulletin.WaitForWord(2);
  Outcome second = Submit(engine, site, 1, 101, calls[1]);
  CHECK_EQ(first.Wait(), "");
  CHECK_EQ(second.Wait(), "");
  CHECK_EQ(NumWrong(site.attributes(), calls), 0);
}

// One of two processes. Process `late` arrives after the stop. The leader, process 0,
// waits at a barrier, the other process for the call log.
void RunAsMember(int process, int late, Bulletin& bulletin) {
  Member member(process, bulletin, {0, 1}, kTimeoutS);
  CallSite site(Spanning(Op::kAllReduce, Method::kDirect, 2));
  Arrays arrays(1);
  const auto calls = MakeCalls(site.attributes(), {}, arrays);
  if (process == late) bulletin.WaitForWord(2);
  Outcome outcome = member.Begin(site, 1, calls)[0];
  if (process != late) ++bulletin.word();
  CHECK_EQ(outcome.Wait(), "");
  CHECK_EQ(NumWrong(site.attributes(), calls, member.ranks()), 0);
}

TEST(TheTimeWhileAllRanksAreStoppedDoesNotCount) {
  Bulletin alone, with_late_leader, with_late_peer;
  Processes one(1, [&](int) { RunAlone(alone); });
  Processes two(2, [&](int process) { RunAsMember(process, 0, with_late_leader); });
  Processes others(2, [&](int process) { RunAsMember(process, 1, with_late_peer); });
  for (Bulletin* each : {&alone, &with_late_leader, &with_late_peer}) {
    each->WaitForWord(1);
  }
  const auto signal = [&](int number) {
    one.Signal(0, number);
    for (Processes* pair : {&two, &others}) {
      for (const int process : {0, 1}) pair->Signal(process, number);
    }
  };
  signal(SIGSTOP);
  std::this_thread::sleep_for(kStop);
  signal(SIGCONT);
  std::this_thread::sleep_for(std::chrono::seconds(1));
  for (Bulletin* each : {&alone, &with_late_leader, &with_late_peer}) ++each->word();
  for (Processes* each : {&one, &two, &others}) {
    for (const std::string& text : each->Join()) CHECK_EQ(text, "");
  }
}

}  // namespace
}  // namespace jax_ub

CHECK_MAIN()
