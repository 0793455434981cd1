// Fails each kCaseStep-th allocation of a call in turn. Every rank's call must end, no result may be
// wrong, and a failure must be reported to all ranks and processes.
#include <pthread.h>

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdlib>
#include <mutex>
#include <new>
#include <stdexcept>
#include <string>
#include <string_view>
#include <thread>
#include <vector>

#include "call_maker.h"
#include "check.h"
#include "engine_calls.h"
#include "member.h"
#include "processes.h"

namespace {

// The number of allocations that succeed before one fails; negative: none fails.
std::atomic<int64_t> num_left{-1};
// Whether allocations in threads that submit calls are counted, too.
std::atomic<bool> counts_submitting{false};
thread_local bool is_submitting = false;

bool IsEngineThread() {
  thread_local int known = -1;
  if (known < 0) {
    char name[16] = "";
    pthread_getname_np(pthread_self(), name, sizeof(name));
    known = std::string_view(name) == "jax_ub";
  }
  return known == 1;
}

bool ShouldFail() {
  if (num_left.load() < 0) return false;
  if (!IsEngineThread() && !(is_submitting && counts_submitting)) return false;
  return num_left.fetch_sub(1) == 0;
}

}  // namespace

// noinline, because gcc 12 otherwise reports a mismatch of malloc and free. All forms of
// new that the engine uses are replaced: AddressSanitizer's own would not match delete.
[[gnu::noinline]] void* operator new(size_t size, const std::nothrow_t&) noexcept {
  return ShouldFail() ? nullptr : std::malloc(size);
}
[[gnu::noinline]] void* operator new(size_t size) {
  void* const memory = operator new(size, std::nothrow);
  if (memory == nullptr) throw std::bad_alloc();
  return memory;
}
[[gnu::noinline]] void operator delete(void* memory) noexcept { std::free(memory); }
[[gnu::noinline]] void operator delete(void* memory, size_t) noexcept {
  std::free(memory);
}

namespace jax_ub {
namespace {

// Waits for the completions of all ranks of a call.
class Ends {
 public:
  explicit Ends(size_t num_ranks) : num_left_(num_ranks) {}
  void Add(bool failed) {
    std::lock_guard lock(mutex_);
    any_failed_ = any_failed_ || failed;
    if (--num_left_ == 0) all_ended_.notify_all();
  }
  // Waits for all ranks; returns whether any rank failed.
  bool Wait() {
    std::unique_lock lock(mutex_);
    all_ended_.wait(lock, [this] { return num_left_ == 0; });
    return any_failed_;
  }

 private:
  std::mutex mutex_;  // guards all below
  std::condition_variable all_ended_;
  size_t num_left_;
  bool any_failed_ = false;
};

// Returns whether any rank failed.
bool RunCall(Engine& engine, CallSite& site, const std::vector<RankCall>& calls) {
  static std::atomic<int64_t> run_id{0};
  const int64_t run = ++run_id;
  Ends ends(calls.size());
  std::vector<std::thread> threads;
  for (size_t rank = 0; rank < calls.size(); ++rank) {
    threads.emplace_back([&, rank] {
      const int64_t device = 100 + static_cast<int64_t>(rank);
      RankCall call = calls[rank];
      const Completion done = [&ends](const std::exception_ptr& failure) {
        ends.Add(failure != nullptr);
      };
      is_submitting = true;
      try {
        engine.Submit(site, run, device, std::move(call), done);
        is_submitting = false;
      } catch (...) {
        is_submitting = false;
        ends.Add(true);
      }
    });
  }
  const bool failed = ends.Wait();
  for (std::thread& thread : threads) thread.join();
  return failed;
}

void PrintCount(Op op, Method method, int64_t last) {
  std::cout << "  " << OpName(op) << " by " << MethodName(method)
            << ": allocations 0 to " << last << std::endl;
}

void CheckOp(Op op, Method method, const Sizes& sizes, bool disagree = false) {
  Engine& engine = NewEngine(kLongS, 3);
  const CallAttributes at = MakeAttributes(op, method, 3);
  CallSite site(at);
  Arrays arrays(1);
  const std::vector<RankCall> calls = MakeCalls(at, sizes, arrays);
  std::vector<RankCall> started = calls;
  if (disagree) started[1].operands[0].rows += 1;
  // Starts the threads: a thread that finds no memory to start is not tried again before
  // the deadline.
  CallSite warm_up(at);
  CHECK(!RunCall(engine, warm_up, calls));
  for (bool submitting : {false, true}) {
    counts_submitting = submitting;
    int64_t first = 0;
    for (bool is_reached = true; is_reached; first += kCaseStep) {
      const int64_t num_failed = engine.counters().failed_calls;
      num_left = first;
      const bool failed = RunCall(engine, site, started);
      is_reached = num_left.exchange(-1) < 0;
      CHECK_EQ(engine.counters().failed_calls > num_failed, failed);
      CHECK(!RunCall(engine, site, calls));
      CHECK_EQ(NumWrong(at, calls), 0);
    }
    PrintCount(op, method, first - kCaseStep);
  }
}

// Submits the calls of the process's ranks and waits for them. Returns the first error,
// or an empty string.
std::string RunLocalCalls(Member& member,
                          CallSite& site,
                          int64_t run,
                          const std::vector<RankCall>& calls) {
  std::vector<Outcome> outcomes(member.ranks().size());
  for (size_t i = 0; i < outcomes.size(); ++i) {
    const int rank = member.ranks()[i];
    RankCall call = calls[rank];
    const Completion done = outcomes[i].AsCompletion();
    is_submitting = true;
    try {
      member.engine().Submit(site, run, 100 + rank, std::move(call), done);
      is_submitting = false;
    } catch (...) {
      is_submitting = false;
      done(std::current_exception());
    }
  }
  std::string text;
  const auto begin = std::chrono::steady_clock::now();
  for (Outcome& outcome : outcomes) {
    while (outcome.IsPending()) {
      if (SecondsSince(begin) > kAtOnceS) {
        num_left = -1;
        throw std::runtime_error("[a rank's call has not ended]");
      }
      SleepBriefly();
    }
    if (text.empty()) text = outcome.Wait();
  }
  return text;
}

// Fails allocations of the second of two processes in turn.
void CheckProcesses(Op op, Method method) {
  const CallAttributes at = Spanning(op, method, 3);
  for (bool submitting : {false, true}) {
    int64_t first = 0;
    for (bool is_reached = true; is_reached; first += kCaseStep) {
      Bulletin bulletin;
      Processes processes(2, [&](int process) {
        Member member(process, bulletin, {0, 1, 1}, kLongS, /*buffer_bytes=*/1 << 14);
        CallSite site(at);
        Arrays arrays(1);
        const std::vector<RankCall> calls = MakeCalls(at, {}, arrays);
        // Starts the threads, as in CheckOp.
        CallSite warm_up(at, 1);
        CHECK_EQ(RunLocalCalls(member, warm_up, 1, calls), "");
        counts_submitting = submitting;
        if (submitting) member.engine().tracer().Start(64);
        if (process == 1) num_left = first;
        std::string text = RunLocalCalls(member, site, 1, calls);
        if (process == 1 && num_left.exchange(-1) < 0) bulletin.word() = 1;
        if (text.empty()) CHECK_EQ(NumWrong(at, calls, member.ranks()), 0);
        // A process that had finished its part before the failure reports it here.
        if (text.empty()) text = RunLocalCalls(member, site, 2, calls);
        if (!text.empty()) throw std::runtime_error(text);
        CHECK_EQ(NumWrong(at, calls, member.ranks()), 0);
      });
      const std::vector<std::string> texts = processes.Join();
      CHECK_EQ(texts[0].empty(), texts[1].empty());
      for (const std::string& text : texts) {
        if (text.empty()) continue;
        CHECK_EQ(Contains(text, "bad_alloc") ? "" : text, "");
      }
      is_reached = bulletin.word() == 1;
    }
    PrintCount(op, method, first - kCaseStep);
  }
}

// The first test, since ThreadSanitizer rejects threads after a fork of a process that
// has had threads.
TEST(AllProcessesFailACallThatRunsOutOfMemoryInOne) {
  CheckProcesses(Op::kAllReduce, Method::kDirect);
  CheckProcesses(Op::kMatmulReduceScatter, Method::kRingExchange);
  CheckProcesses(Op::kBulkAllGather, Method::kBulk);
}

TEST(ASharedCallEndsWhereMemoryIsMissing) {
  CheckOp(Op::kAllGatherMatmul, Method::kDirect, {1, 65, 384, 280});
}

TEST(ACallOnTheLastRanksThreadEndsWhereMemoryIsMissing) {
  CheckOp(Op::kMatmulReduceScatter, Method::kDirect, {1, 2, 3, 2});
}

TEST(ACallOfSchedulesEndsWhereMemoryIsMissing) {
  CheckOp(Op::kAllGatherMatmul, Method::kRingExchange, {1, 2, 3, 2});
  CheckOp(Op::kMatmulReduceScatter, Method::kPipeline, {1, 2, 3, 2});
  CheckOp(Op::kBulkAllGather, Method::kBulk, {1, 2, 3, 2});
}

TEST(ACallThatFailsEndsWhereMemoryIsMissing) {
  CheckOp(Op::kAllGatherMatmul, Method::kDirect, {1, 2, 3, 2}, true);
  CheckOp(Op::kAllGatherMatmul, Method::kRingExchange, {1, 2, 3, 2}, true);
}

}  // namespace
}  // namespace jax_ub

CHECK_MAIN()
