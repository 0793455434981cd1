// Tests that traces record the steps of ranks in fixed memory, and nothing while
// tracing is off.
#include "engine/trace.h"

#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <fstream>
#include <iostream>
#include <latch>
#include <limits>
#include <memory>
#include <sstream>
#include <string>
#include <thread>
#include <vector>

#include "call_maker.h"
#include "check.h"
#include "engine/cpu/engine.h"

namespace jax_ub {
namespace {

using jax_ub_test::Arrays;
using jax_ub_test::MakeCalls;
using jax_ub_test::NumWrong;
using jax_ub_test::Sizes;

constexpr int kRanks = 3;
constexpr int64_t kRoom = 1000;

// Engines are never destroyed.
Engine& TheEngine() {
  static auto& engine = *new Engine(2, {60});
  return engine;
}

CallAttributes MakeAttributes(Op op, Method method) {
  CallAttributes at;
  at.op = op;
  at.method = method;
  at.num_ranks = kRanks;
  at.ranks = {105, 103, 104};
  at.num_splits = 2;
  at.label = "traced";
  return at;
}

// Runs the call of every rank and waits for them. The last completion may run in a
// thread of the engine, so the latch outlives this function.
int64_t RunAll(CallSite& site, int64_t run_id, const CallAttributes& at) {
  Arrays arrays(1);
  std::vector<RankCall> calls = MakeCalls(at, Sizes{}, arrays);
  auto done = std::make_shared<std::latch>(at.num_ranks);
  for (int rank = 0; rank < at.num_ranks; ++rank) {
    TheEngine().Submit(site, run_id, at.ranks[rank], calls[rank],
                       [done](const std::exception_ptr& failure) {
                         CHECK(failure == nullptr);
                         done->count_down();
                       });
  }
  done->wait();
  return NumWrong(at, calls);
}

Trace TraceOf(Op op, Method method) {
  const CallAttributes at = MakeAttributes(op, method);
  CallSite site(at);
  TheEngine().tracer().Start(kRoom);
  CHECK_EQ(RunAll(site, 1, at), 0);
  TheEngine().tracer().Stop();
  return TheEngine().tracer().Read();
}

std::vector<TraceEvent> EventsOf(const Trace& trace, TraceKind kind, int rank) {
  std::vector<TraceEvent> events;
  for (const TraceThread& thread : trace.threads) {
    for (const TraceEvent& event : thread.events) {
      if (event.kind == kind && event.rank == rank) events.push_back(event);
    }
  }
  return events;
}

// Returns the steps of a rank, sorted by time.
std::vector<TraceEvent> StepsOf(const Trace& trace, int rank) {
  std::vector<TraceEvent> events;
  for (const TraceThread& thread : trace.threads) {
    for (const TraceEvent& event : thread.events) {
      const bool step = event.kind < TraceKind::kCall;
      if (step && event.rank == rank) events.push_back(event);
    }
  }
  std::stable_sort(events.begin(), events.end(), [](const auto& a, const auto& b) {
    return a.begin_ns < b.begin_ns;
  });
  return events;
}

TEST(ARankDoesWhatItsScheduleSays) {
  for (Method method : {Method::kRingExchange, Method::kPipeline}) {
    const Trace trace = TraceOf(Op::kMatmulReduceScatter, method);
    for (int rank = 0; rank < kRanks; ++rank) {
      const Schedule schedule =
          MakeSchedule(CollectiveKind::kMatmulReduceScatter, method, rank, kRanks, 2);
      const std::vector<TraceEvent> events = StepsOf(trace, rank);
      CHECK_EQ(events.size(), schedule.steps.size());
      for (size_t i = 0; i < std::min(events.size(), schedule.steps.size()); ++i) {
        const Step& step = schedule.steps[i];
        CHECK_EQ(TraceKindName(events[i].kind), StepKindName(step.kind));
        CHECK_EQ(events[i].chunk, step.chunk);
        CHECK_EQ(events[i].split, step.split);
        CHECK_EQ(events[i].peer, step.peer);
        CHECK(events[i].payload == step.payload);
        CHECK(i == 0 || events[i].begin_ns >= events[i - 1].end_ns);
      }
    }
  }
}

TEST(UnitsOfAProductAreWithinItsStep) {
  const Trace trace = TraceOf(Op::kAllGatherMatmul, Method::kRingExchange);
  for (int rank = 0; rank < kRanks; ++rank) {
    const std::vector<TraceEvent> units = EventsOf(trace, TraceKind::kUnit, rank);
    CHECK(!units.empty());
    for (const TraceEvent& step : EventsOf(trace, TraceKind::kMultiply, rank)) {
      CHECK(std::any_of(units.begin(), units.end(), [&](const TraceEvent& unit) {
        return unit.chunk == step.chunk && unit.begin_ns >= step.begin_ns &&
               unit.end_ns <= step.end_ns;
      }));
    }
  }
}

TEST(ACallSpansEverythingOfItsRank) {
  for (Method method : {Method::kDirect, Method::kPipeline}) {
    const Trace trace = TraceOf(Op::kMatmulAllReduce, method);
    CHECK_EQ(trace.calls.size(), size_t{1});
    CHECK_EQ(trace.calls[0].label, "traced");
    CHECK(trace.calls[0].op == Op::kMatmulAllReduce);
    CHECK(trace.calls[0].method == method);
    CHECK_EQ(trace.calls[0].num_ranks, kRanks);
    CHECK_EQ(trace.calls[0].num_splits, 2);
    CHECK((trace.calls[0].devices == std::vector<int64_t>{105, 103, 104}));
    CHECK_EQ(trace.calls[0].operands, "f32[2, 15, 7] f32[7, 3]");
    for (int rank = 0; rank < kRanks; ++rank) {
      const std::vector<TraceEvent> calls = EventsOf(trace, TraceKind::kCall, rank);
      const std::vector<TraceEvent> gathers = EventsOf(trace, TraceKind::kGather, rank);
      CHECK_EQ(calls.size(), size_t{1});
      CHECK_EQ(gathers.size(), size_t{1});
      CHECK_EQ(calls[0].begin_ns, gathers[0].begin_ns);
      CHECK_EQ(calls[0].call, 0);
      for (const TraceEvent& step : StepsOf(trace, rank)) {
        CHECK(step.begin_ns >= gathers[0].end_ns && step.end_ns <= calls[0].end_ns);
      }
    }
    CHECK_EQ(EventsOf(trace, TraceKind::kUnit, kNone).empty(),
             method != Method::kDirect);
  }
}

TEST(BulkProductsAndCopiesAreUnitsOfAllRanks) {
  const Trace trace = TraceOf(Op::kBulkAllGather, Method::kDirect);
  CHECK(!EventsOf(trace, TraceKind::kUnit, kNone).empty());
  CHECK(!EventsOf(trace, TraceKind::kCopy, kNone).empty());
  const Trace sums = TraceOf(Op::kBulkReduceScatter, Method::kDirect);
  CHECK(!EventsOf(sums, TraceKind::kReduce, kNone).empty());
}

TEST(ALocalCallBelongsToItsDevice) {
  CallAttributes at = MakeAttributes(Op::kMatmul, Method::kDirect);
  at.ranks.clear();
  at.num_ranks = 1;
  CallSite site(at);
  Arrays arrays(1);
  const std::vector<RankCall> calls = MakeCalls(at, Sizes{}, arrays);
  std::latch done(1);
  TheEngine().tracer().Start(kRoom);
  TheEngine().Submit(site, 1, 7, calls[0],
                     [&](const std::exception_ptr&) { done.count_down(); });
  done.wait();
  TheEngine().tracer().Stop();
  const Trace trace = TheEngine().tracer().Read();
  CHECK_EQ(trace.calls.size(), size_t{1});
  CHECK((trace.calls[0].devices == std::vector<int64_t>{7}));
}

TEST(NothingIsRecordedWhileItIsOff) {
  Tracer& tracer = TheEngine().tracer();
  tracer.Start(kRoom);
  tracer.Stop();
  const CallAttributes at = MakeAttributes(Op::kAllGatherMatmul, Method::kPipeline);
  CallSite site(at);
  CHECK_EQ(RunAll(site, 1, at), 0);
  const Trace trace = tracer.Read();
  CHECK(trace.calls.empty());
  CHECK(trace.threads.empty());
}

TEST(AnEventHoldsTheLargestSplitThatACallMayHave) {
  Tracer tracer;
  tracer.Start(1);
  Step step;
  step.split = (1 << 16) - 1;  // csrc/ffi/attributes.cc limits num_splits to 1 << 16
  {
    TraceScope scope(tracer.BeginCall({}), TraceKind::kPut, step);
  }
  CHECK_EQ(tracer.Read().threads.at(0).events.at(0).split, step.split);
}

TEST(AFullBufferCountsWhatItDrops) {
  Tracer tracer;
  tracer.Start(3);
  const TraceContext context = tracer.BeginCall({});
  for (int i = 0; i < 10; ++i) TraceScope scope(context, TraceKind::kWait);
  const Trace trace = tracer.Read();
  CHECK_EQ(trace.threads.size(), size_t{1});
  CHECK_EQ(trace.threads[0].events.size(), size_t{3});
  CHECK_EQ(trace.threads[0].num_dropped, int64_t{7});
}

TEST(WithoutMemoryAllEventsAreDroppedAndCounted) {
  Tracer tracer;
  for (const int64_t room : {std::numeric_limits<int64_t>::max(), int64_t{1}}) {
    tracer.Start(room);
    const TraceContext context = tracer.BeginCall({});
    for (int i = 0; i < 2; ++i) TraceScope scope(context, TraceKind::kWait);
    const Trace trace = tracer.Read();
    CHECK_EQ(trace.threads.size(), size_t{1});
    CHECK_EQ(trace.threads[0].events.size(), room == 1 ? size_t{1} : size_t{0});
    CHECK_EQ(trace.threads[0].num_dropped, room == 1 ? int64_t{1} : int64_t{2});
  }
}

// Returns the resident memory of this process.
int64_t ResidentBytes() {
  std::ifstream file("/proc/self/statm");
  int64_t size_pages = 0, resident_pages = 0;
  CHECK(bool(file >> size_pages >> resident_pages));
  return resident_pages * sysconf(_SC_PAGESIZE);
}

TEST(MemoryIsAllocatedAsEventsAreRecorded) {
  constexpr int64_t kManyEvents = 1 << 22;
  constexpr int64_t kReservedBytes = kManyEvents * sizeof(TraceEvent);
  Tracer tracer;
  tracer.Start(kManyEvents);
  const TraceContext context = tracer.BeginCall({});
  const int64_t before_bytes = ResidentBytes();
  for (int i = 0; i < 10; ++i) context.Since(1, TraceKind::kCall);
  CHECK(ResidentBytes() - before_bytes < kReservedBytes / 8);
  CHECK_EQ(tracer.Read().threads[0].events.size(), size_t{10});
}

// Returns the size of the memory that gets no huge pages.
int64_t SmallPageBytes() {
  std::ifstream file("/proc/self/smaps");
  int64_t size_bytes = 0, bytes = 0;
  for (std::string line; std::getline(file, line);) {
    std::istringstream words(line);
    std::string key;
    words >> key;
    if (key == "Size:" && words >> size_bytes) size_bytes *= 1024;
    if (key != "VmFlags:") continue;
    while (words >> key) bytes += key == "nh" ? size_bytes : 0;
  }
  return bytes;
}

TEST(NoHugePageIsFilledForTheFirstEvent) {
  // Linux kernels without transparent huge pages do not support the advice.
  if (!std::ifstream("/sys/kernel/mm/transparent_hugepage/enabled")) {
    std::cout << "not run: the kernel has no transparent huge pages\n";
    return;
  }
  constexpr int64_t kManyEvents = 1 << 22;
  Tracer tracer;
  tracer.Start(kManyEvents);
  const TraceContext context = tracer.BeginCall({});
  const int64_t before_bytes = SmallPageBytes();
  context.Since(1, TraceKind::kCall);
  const int64_t reserved_bytes = kManyEvents * sizeof(TraceEvent);
  CHECK(SmallPageBytes() - before_bytes >= reserved_bytes);
}

TEST(ThreadsBeyondTheTableAreCounted) {
  Tracer tracer;
  tracer.Start(1);
  const TraceContext context = tracer.BeginCall({});
  // The threads exist at the same time, so that their ids differ.
  std::latch recorded(Tracer::kNumThreads + 2);
  std::vector<std::thread> threads;
  for (int i = 0; i < Tracer::kNumThreads + 2; ++i) {
    threads.emplace_back([&] {
      context.Since(1, TraceKind::kCall);
      recorded.arrive_and_wait();
    });
  }
  for (std::thread& thread : threads) thread.join();
  const Trace trace = tracer.Read();
  CHECK_EQ(trace.threads.size(), size_t{Tracer::kNumThreads} + 1);
  CHECK_EQ(trace.threads.back().num_dropped, int64_t{2});
}

TEST(StartClearsEarlierEvents) {
  Tracer tracer;
  for (int16_t round = 0; round < 3; ++round) {
    tracer.Start(5 + round);
    const TraceContext context = tracer.BeginCall({}).OfRank(round);
    CHECK_EQ(context.call, 0);
    for (int i = 0; i < 20; ++i) context.Since(1, TraceKind::kCall);
    const Trace trace = tracer.Read();
    CHECK_EQ(trace.calls.size(), size_t{1});
    CHECK_EQ(trace.threads[0].events.size(), size_t(5 + round));
    CHECK_EQ(trace.threads[0].events[0].rank, round);
  }
}

TEST(ACallOfAnEarlierTraceIsNotInTheNextOne) {
  Tracer tracer;
  tracer.Start(kRoom);
  const TraceContext old = tracer.BeginCall({});
  {
    const TraceScope scope(old, TraceKind::kWait);
    tracer.Stop();
    tracer.Start(kRoom);
  }
  const TraceContext context = tracer.BeginCall({}).OfRank(1);
  context.Since(1, TraceKind::kCall);
  old.Since(1, TraceKind::kCall);
  const Trace trace = tracer.Read();
  CHECK_EQ(trace.calls.size(), size_t{1});
  CHECK_EQ(trace.threads.size(), size_t{1});
  CHECK_EQ(trace.threads[0].events.size(), size_t{1});
  CHECK_EQ(trace.threads[0].events[0].rank, 1);
}

TEST(ThreadsRecordWhileOthersReadAndStart) {
  Tracer tracer;
  std::atomic<bool> stop{false};
  std::vector<std::thread> threads;
  for (int16_t t = 0; t < 3; ++t) {
    threads.emplace_back([&, t] {
      while (!stop) {
        if (!tracer.enabled()) continue;
        TraceContext context = tracer.BeginCall({});
        context.call = context.rank = t;
        TraceScope scope(context, TraceKind::kPut);
      }
    });
  }
  const auto end = std::chrono::steady_clock::now() + std::chrono::milliseconds(300);
  while (std::chrono::steady_clock::now() < end) {
    tracer.Start(64);
    for (int i = 0; i < 10; ++i) {
      for (const TraceThread& thread : tracer.Read().threads) {
        for (const TraceEvent& event : thread.events) {
          CHECK(event.call == event.rank && event.begin_ns <= event.end_ns);
        }
      }
    }
    tracer.Stop();
  }
  stop = true;
  for (std::thread& thread : threads) thread.join();
}

}  // namespace
}  // namespace jax_ub

CHECK_MAIN()
