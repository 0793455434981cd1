// Tests the thread pool: threads share jobs, whose number of threads is bounded, and
// runs never wait for each other.
#include "engine/cpu/thread_pool.h"

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <functional>
#include <future>
#include <latch>
#include <memory>
#include <mutex>
#include <stdexcept>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "check.h"
#include "no_thread_starts.h"

namespace jax_ub {
namespace {

// Thread pools are never destroyed, including the tests' pools.
ThreadPool& NewPool(int num_threads) {
  static std::mutex mutex;
  static auto& pools = *new std::vector<ThreadPool*>;
  std::lock_guard lock(mutex);
  pools.push_back(new ThreadPool(num_threads));
  return *pools.back();
}

class CountedJob : public ParallelJob {
 public:
  explicit CountedJob(int64_t num_units)
      : ParallelJob(num_units, [this](int64_t unit, Scratch&) { Run(unit); }),
        runs_(num_units) {}

  void Run(int64_t unit) {
    const int busy = ++num_busy_;
    int most = most_busy_.load();
    while (busy > most && !most_busy_.compare_exchange_weak(most, busy)) {
    }
    ++runs_[unit];
    if (unit == failing_unit) throw std::runtime_error("unit failed");
    if (delay_us > 0) std::this_thread::sleep_for(std::chrono::microseconds(delay_us));
    --num_busy_;
  }

  bool EveryUnitRanOnce() const {
    for (const auto& runs : runs_) {
      if (runs.load() != 1) return false;
    }
    return true;
  }
  int most_busy() const { return most_busy_.load(); }

  int64_t failing_unit = -1;
  int delay_us = 0;  // of every unit

 private:
  std::vector<std::atomic<int>> runs_;
  std::atomic<int> num_busy_{0};
  std::atomic<int> most_busy_{0};
};

void RunAndWait(ThreadPool& pool, const std::shared_ptr<CountedJob>& job) {
  pool.Participate(job);
  job->Wait();
}

// A barrier of `count` threads. It is shared, because the last thread to leave is
// unknown.
class Barrier {
 public:
  explicit Barrier(int count) : left_(count) {}
  void Join() {
    std::unique_lock lock(mutex_);
    if (--left_ == 0) all_here_.notify_all();
    all_here_.wait(lock, [this] { return left_ == 0; });
  }

 private:
  std::mutex mutex_;  // guards left_
  std::condition_variable all_here_;
  int left_;
};

TEST(EveryUnitRunsOnceOnAnyThread) {
  ThreadPool& pool = NewPool(3);
  for (int64_t num_units : {1, 2, 7, 1000}) {
    auto job = std::make_shared<CountedJob>(num_units);
    RunAndWait(pool, job);
    CHECK(job->EveryUnitRanOnce());
    CHECK(job->most_busy() <= 3);
  }
}

TEST(UnitsMayRunOutWhileAThreadWakes) {
  ThreadPool& pool = NewPool(3);
  for (int i = 0; i < 20000; ++i) {
    auto job = std::make_shared<CountedJob>(3);
    RunAndWait(pool, job);
    CHECK(job->EveryUnitRanOnce());
  }
}

TEST(AJobWithoutUnitsIsDone) {
  auto job = std::make_shared<CountedJob>(0);
  RunAndWait(NewPool(2), job);
  CHECK(job->EveryUnitRanOnce());
}

TEST(ManyJobsFromManyThreadsAreDone) {
  ThreadPool& pool = NewPool(2);
  std::vector<std::thread> threads;
  std::atomic<int> num_whole{0};
  for (int t = 0; t < 6; ++t) {
    threads.emplace_back([&] {
      for (int i = 0; i < 50; ++i) {
        auto job = std::make_shared<CountedJob>(1 + i % 9);
        RunAndWait(pool, job);
        num_whole += job->EveryUnitRanOnce();
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  CHECK_EQ(num_whole.load(), 300);
}

TEST(NoMoreThreadsComputeThanAllowed) {
  ThreadPool& pool = NewPool(2);
  std::atomic<int> num_busy{0};
  std::atomic<int> most_busy{0};
  const auto count = [&](int64_t unit, Scratch&) {
    const int busy = ++num_busy;
    int most = most_busy.load();
    while (busy > most && !most_busy.compare_exchange_weak(most, busy)) {
    }
    std::this_thread::sleep_for(std::chrono::microseconds(200));
    --num_busy;
  };
  std::vector<std::thread> threads;
  for (int t = 0; t < 5; ++t) {
    threads.emplace_back([&] { pool.ParallelFor(20, count); });
  }
  for (std::thread& thread : threads) thread.join();
  CHECK(most_busy.load() <= 2);
}

TEST(ManyTasksThatWaitForEachOtherAllRun) {
  ThreadPool& pool = NewPool(1);
  constexpr int kNumRuns = 40;
  const auto barrier = std::make_shared<Barrier>(kNumRuns + 1);
  for (int i = 0; i < kNumRuns; ++i)
    pool.SubmitBlocking([barrier] { barrier->Join(); });
  barrier->Join();
  CHECK(true);
}

TEST(BlockingTasksStartWhileEveryThreadComputes) {
  ThreadPool& pool = NewPool(1);
  const auto barrier = std::make_shared<Barrier>(3);
  std::thread waiting(
      [&] { pool.ParallelFor(1, [&](int64_t, Scratch&) { barrier->Join(); }); });
  pool.SubmitBlocking([barrier] { barrier->Join(); });
  barrier->Join();
  waiting.join();
  CHECK(true);
}

TEST(AJobIsDoneWhileTasksBlock) {
  ThreadPool& pool = NewPool(2);
  const auto barrier = std::make_shared<Barrier>(5);
  for (int i = 0; i < 4; ++i) pool.SubmitBlocking([barrier] { barrier->Join(); });
  auto job = std::make_shared<CountedJob>(100);
  RunAndWait(pool, job);
  CHECK(job->EveryUnitRanOnce());
  barrier->Join();
}

TEST(TheFirstFailureIsThrownAndTheRestLeftOut) {
  ThreadPool& pool = NewPool(2);
  auto job = std::make_shared<CountedJob>(100000);
  job->failing_unit = 3;
  // Without the delay, another thread might do all units before the failed one is
  // reported.
  job->delay_us = 200;
  CHECK_THROWS(RunAndWait(pool, job), "unit failed");
  CHECK(!job->EveryUnitRanOnce());
  auto inline_job = std::make_shared<CountedJob>(10);
  inline_job->failing_unit = 3;
  pool.RunInline(*inline_job);
  CHECK_THROWS(inline_job->Wait(), "unit failed");
}

TEST(IfNoThreadStartsTheOthersDoTheWork) {
  ThreadPool& pool = NewPool(4);
  {
    const NoThreadStarts limit;
    auto job = std::make_shared<CountedJob>(1000);
    RunAndWait(pool, job);
    CHECK(job->EveryUnitRanOnce());
    constexpr int kNumRuns = 10;
    const auto all_ran = std::make_shared<Barrier>(2);
    const auto num_runs = std::make_shared<std::atomic<int>>(0);
    for (int i = 0; i < kNumRuns; ++i) {
      pool.SubmitBlocking([all_ran, num_runs] {
        if (++*num_runs == kNumRuns) all_ran->Join();
      });
    }
    all_ran->Join();
  }
  // Threads that did not start are not counted, so the thread pool grows as soon as it
  // can.
  constexpr int kNumRuns = 10;
  const auto barrier = std::make_shared<Barrier>(kNumRuns + 1);
  for (int i = 0; i < kNumRuns; ++i)
    pool.SubmitBlocking([barrier] { barrier->Join(); });
  barrier->Join();
}

std::shared_ptr<ParallelJob> OneUnit(std::function<void()> unit) {
  return std::make_shared<ParallelJob>(
      1, [unit = std::move(unit)](int64_t, Scratch&) { unit(); });
}

TEST(IfNoThreadStartsAThreadThatLeavesAJobRunsTheNext) {
  ThreadPool& pool = NewPool(1);
  const NoThreadStarts limit;
  const auto is_posted = std::make_shared<std::latch>(1);
  const auto waited_for = std::make_shared<CountedJob>(3);
  const auto last = OneUnit([&pool, is_posted, waited_for] {
    pool.SubmitBlocking([&pool, is_posted, waited_for] {
      pool.Participate(waited_for);  // returns at once: the only place is taken
      is_posted->count_down();
      waited_for->Wait();
    });
    is_posted->wait();
  });
  pool.Participate(last);
  CHECK(waited_for->EveryUnitRanOnce());
}

TEST(IfNoThreadStartsAJobRunsBeforeATaskThatWaitsForIt) {
  ThreadPool& pool = NewPool(1);
  const NoThreadStarts limit;
  struct Stage {
    std::latch is_entered{1};
    std::latch is_queued{1};
    std::promise<void> is_over;
  };
  const auto stage = std::make_shared<Stage>();
  // The unit runs on the pool's thread, because the caller's place is taken while it is
  // submitted.
  const auto first = OneUnit([stage] {
    stage->is_entered.count_down();
    stage->is_queued.wait();
  });
  pool.Participate(OneUnit([&pool, first] { pool.Participate(first); }));
  stage->is_entered.wait();
  const auto waited_for = std::make_shared<CountedJob>(3);
  pool.SubmitBlocking([stage, waited_for] {
    waited_for->Wait();
    stage->is_over.set_value();
  });
  pool.Participate(waited_for);
  stage->is_queued.count_down();
  CHECK(stage->is_over.get_future().wait_for(std::chrono::seconds(20)) ==
        std::future_status::ready);
}

TEST(APoolWithoutAThreadIsAnError) {
  const NoThreadStarts limit;
  CHECK_THROWS(NewPool(1), "is the limit of threads reached (ulimit -u,");
}

TEST(ScratchIsKeptAndCounted) {
  ThreadPool& pool = NewPool(1);
  for (int i = 0; i < 20; ++i) {
    ParallelJob job(1, [](int64_t, Scratch& scratch) { scratch.Reserve(3 << 20); });
    pool.RunInline(job);
  }
  CHECK(pool.scratch_bytes() >= 3 << 20);
  CHECK(pool.scratch_bytes() < 6 << 20);
}

}  // namespace
}  // namespace jax_ub

CHECK_MAIN()
