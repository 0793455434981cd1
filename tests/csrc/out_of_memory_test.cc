// Makes each allocation of a call fail once, and checks that the call then ends on all
// ranks and the next call is right.
#include <pthread.h>

#include <atomic>
#include <condition_variable>
#include <cstdlib>
#include <mutex>
#include <new>
#include <string_view>
#include <thread>
#include <vector>

#include "call_maker.h"
#include "check.h"
#include "engine_calls.h"

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

void FailIfItsTurn() {
  if (num_left.load() < 0) return;
  if (!IsEngineThread() && !(is_submitting && counts_submitting)) return;
  if (num_left.fetch_sub(1) == 0) throw std::bad_alloc();
}

}  // namespace

// noinline, because gcc 12 otherwise reports a mismatch of malloc and free.
[[gnu::noinline]] void* operator new(size_t size) {
  FailIfItsTurn();
  void* const memory = std::malloc(size);
  if (memory == nullptr) throw std::bad_alloc();
  return memory;
}
[[gnu::noinline]] void operator delete(void* memory) noexcept { std::free(memory); }
[[gnu::noinline]] void operator delete(void* memory, size_t) noexcept {
  std::free(memory);
}

namespace jax_ub {
namespace {

using jax_ub_test::Arrays;
using jax_ub_test::MakeCalls;
using jax_ub_test::NumWrong;
using jax_ub_test::Sizes;

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

void CheckOp(Op op, Method method, const Sizes& sizes, bool disagree = false) {
  Engine& engine = NewEngine(kLongS, 3);
  const CallAttributes at = MakeAttributes(op, method, 3);
  CallSite site(at);
  Arrays arrays(1);
  const std::vector<RankCall> calls = MakeCalls(at, sizes, arrays);
  std::vector<RankCall> started = calls;
  if (disagree) started[1].operands[0].rows += 1;
  for (bool submitting : {false, true}) {
    counts_submitting = submitting;
    int64_t first = 0;
    for (bool is_reached = true; is_reached; ++first) {
      const int64_t num_failed = engine.counters().failed_calls;
      num_left = first;
      const bool failed = RunCall(engine, site, started);
      is_reached = num_left.exchange(-1) < 0;
      CHECK_EQ(engine.counters().failed_calls > num_failed, failed);
      CHECK(!RunCall(engine, site, calls));
      CHECK_EQ(NumWrong(at, calls), 0);
    }
    std::cout << "  " << OpName(op) << " by " << MethodName(method) << ": " << first - 1
              << " allocations" << std::endl;
  }
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
