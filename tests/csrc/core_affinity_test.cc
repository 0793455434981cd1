// Tests the cores of the thread pool: threads that compute at the same time use
// different cores.
#include "engine/cpu/core_affinity.h"

#include <condition_variable>
#include <mutex>
#include <optional>
#include <thread>

#include "check.h"

namespace jax_ub {
namespace {

cpu_set_t Allowed() {
  cpu_set_t allowed;
  sched_getaffinity(0, sizeof(allowed), &allowed);
  return allowed;
}

cpu_set_t Only(int core) {
  cpu_set_t only;
  CPU_ZERO(&only);
  CPU_SET(core, &only);
  return only;
}

TEST(CoresThatAThreadMayNotRunOnDoNotCount) {
  const cpu_set_t before = Allowed();
  CHECK_EQ(NumAllowedCores(), CPU_COUNT(&before));
  const cpu_set_t only = Only(sched_getcpu());
  CHECK(sched_setaffinity(0, sizeof(only), &only) == 0);
  CHECK_EQ(NumAllowedCores(), 1);
  sched_setaffinity(0, sizeof(before), &before);
}

TEST(AThreadCountIsAtLeastOneAndAtMostTheCores) {
  CHECK_EQ(DefaultNumThreads(8, std::nullopt), 8);
  CHECK_EQ(DefaultNumThreads(8, 2.5), 3);
  CHECK_EQ(DefaultNumThreads(8, 0.1), 1);
  CHECK_EQ(DefaultNumThreads(2, 64.0), 2);
}

TEST(AThreadThatComputesStaysOnItsCore) {
  const cpu_set_t before = Allowed();
  CoreAffinity cores;
  {
    const CoreAffinity::ScopedCore scoped(cores, CoreAffinity::Who::kCaller,
                                          CPU_SETSIZE);
    const cpu_set_t now = Allowed();
    const cpu_set_t here = Only(sched_getcpu());
    CHECK(CPU_EQUAL(&now, &here));
  }
  const cpu_set_t after = Allowed();
  CHECK(CPU_EQUAL(&after, &before));
}

TEST(FewerThreadsThanCoresMayMove) {
  const cpu_set_t before = Allowed();
  CoreAffinity cores;
  const CoreAffinity::ScopedCore scoped(cores, CoreAffinity::Who::kCaller,
                                        CPU_COUNT(&before) - 1);
  const cpu_set_t now = Allowed();
  CHECK(CPU_EQUAL(&now, &before));
}

TEST(ThreadsComputeOnTheCpuSet) {
  const cpu_set_t before = Allowed();
  CoreAffinity cores;
  for (int core = 0; core < CPU_SETSIZE; ++core) {
    if (!CPU_ISSET(core, &before)) continue;
    cores.set_cpu_set({core});
    {
      const CoreAffinity::ScopedCore scoped(cores, CoreAffinity::Who::kCaller, 1);
      CHECK_EQ(sched_getcpu(), core);
    }
    const cpu_set_t after = Allowed();
    CHECK(CPU_EQUAL(&after, &before));
  }
  cores.set_cpu_set({CPU_SETSIZE - 1});  // where it may not run: anywhere, then
  const CoreAffinity::ScopedCore scoped(cores, CoreAffinity::Who::kCaller, CPU_SETSIZE);
  CHECK(CPU_ISSET(sched_getcpu(), &before));
}

TEST(AWorkerLeavesTheCoreOfAnEarlierCallIfItIsTaken) {
  const cpu_set_t before = Allowed();
  if (CPU_COUNT(&before) < 2) return;  // nowhere to move to
  CoreAffinity cores;
  const CoreAffinity::ScopedCore first(cores, CoreAffinity::Who::kCaller, CPU_SETSIZE);
  const int core = sched_getcpu();
  std::thread second([&] {
    const cpu_set_t here = Only(core);  // as AssignIdleCores did in an earlier call
    CHECK(sched_setaffinity(0, sizeof(here), &here) == 0);
    {
      const CoreAffinity::ScopedCore scoped(cores, CoreAffinity::Who::kWorker,
                                            CPU_SETSIZE);
      CHECK(sched_getcpu() != core);
    }
    const cpu_set_t after = Allowed();
    CHECK(CPU_EQUAL(&after, &here));
  });
  second.join();
}

TEST(SecondThreadOnACoreMovesToAnother) {
  const cpu_set_t before = Allowed();
  if (CPU_COUNT(&before) < 2) return;  // nowhere to move to
  CoreAffinity cores;
  const int core = sched_getcpu();
  const cpu_set_t here = Only(core);
  CHECK(sched_setaffinity(0, sizeof(here), &here) == 0);
  std::optional<CoreAffinity::ScopedCore> first;
  first.emplace(cores, CoreAffinity::Who::kCaller, CPU_SETSIZE);
  sched_setaffinity(0, sizeof(before), &before);
  std::thread second([&] {
    sched_setaffinity(0, sizeof(here), &here);
    sched_setaffinity(0, sizeof(before), &before);  // still there, most likely
    {
      const CoreAffinity::ScopedCore scoped(cores, CoreAffinity::Who::kWorker,
                                            CPU_SETSIZE);
      CHECK(sched_getcpu() != core);
      const cpu_set_t now = Allowed();
      CHECK(!CPU_ISSET(core, &now));
    }
    const cpu_set_t after = Allowed();
    CHECK(CPU_EQUAL(&after, &before));
  });
  second.join();
  first.reset();
  sched_setaffinity(0, sizeof(before), &before);
}

TEST(ThreadsStayWhereEveryCoreIsTaken) {
  const cpu_set_t before = Allowed();
  const cpu_set_t only = Only(sched_getcpu());
  CHECK(sched_setaffinity(0, sizeof(only), &only) == 0);
  CoreAffinity cores;
  const CoreAffinity::ScopedCore first(cores, CoreAffinity::Who::kCaller, CPU_SETSIZE);
  {
    const CoreAffinity::ScopedCore second(cores, CoreAffinity::Who::kWorker,
                                          CPU_SETSIZE);
    const cpu_set_t now = Allowed();
    CHECK(CPU_EQUAL(&now, &only));
  }
  sched_setaffinity(0, sizeof(before), &before);
}

// A thread that sleeps, and returns the cores on which it may run.
class Sleeper {
 public:
  explicit Sleeper(CoreAffinity& cores) : cores_(cores), loop_([this] { Loop(); }) {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [this] { return thread_.has_value(); });
  }
  ~Sleeper() {
    {
      std::lock_guard lock(mutex_);
      ends_ = true;
    }
    changed_.notify_all();
    loop_.join();
  }

  CoreAffinity::Thread& thread() { return *thread_; }
  cpu_set_t AllowedThere() {
    std::unique_lock lock(mutex_);
    asked_ = true;
    changed_.notify_all();
    changed_.wait(lock, [this] { return !asked_; });
    return allowed_;
  }

 private:
  void Loop() {
    std::unique_lock lock(mutex_);
    thread_.emplace(cores_);
    changed_.notify_all();
    while (!ends_) {
      changed_.wait(lock, [this] { return asked_ || ends_; });
      if (asked_) allowed_ = Allowed();
      asked_ = false;
      changed_.notify_all();
    }
  }

  CoreAffinity& cores_;
  std::mutex mutex_;  // guards all below, but for the thread that runs the loop
  std::condition_variable changed_;
  std::optional<CoreAffinity::Thread> thread_;
  cpu_set_t allowed_ = {};
  bool asked_ = false;
  bool ends_ = false;
  std::thread loop_;  // last: it uses the others
};

TEST(AThreadIsWokenOnACoreWhereNoThreadComputes) {
  const cpu_set_t before = Allowed();
  if (CPU_COUNT(&before) < 2) return;  // nowhere to be woken
  CoreAffinity cores;
  Sleeper sleeper(cores);
  cores.AssignIdleCores(sleeper.thread());  // no thread has called so far: no effect
  const cpu_set_t first = sleeper.AllowedThere();
  CHECK(CPU_EQUAL(&first, &before));
  {
    const CoreAffinity::ScopedCore scoped(cores, CoreAffinity::Who::kCaller,
                                          CPU_SETSIZE);
    const int core = sched_getcpu();
    for (int i = 0; i < 2; ++i) {  // the second time there is nothing to do
      cores.AssignIdleCores(sleeper.thread());
      cpu_set_t assigned = sleeper.AllowedThere();
      CHECK(!CPU_ISSET(core, &assigned));
      CPU_SET(core, &assigned);
      CHECK(CPU_EQUAL(&assigned, &before));
    }
  }
  // The thread stays on its cores until a thread on another core wakes it, or it is
  // woken for other work.
  const cpu_set_t kept = sleeper.AllowedThere();
  CHECK_EQ(CPU_COUNT(&kept), CPU_COUNT(&before) - 1);
  cores.Release(sleeper.thread());
  cores.Release(sleeper.thread());
  const cpu_set_t released = sleeper.AllowedThere();
  CHECK(CPU_EQUAL(&released, &before));
}

// Otherwise the new thread would always stay on the core of the thread that started it.
TEST(AThreadThatAComputingThreadStartsMayRunOnAllCores) {
  const cpu_set_t before = Allowed();
  CoreAffinity cores;
  const CoreAffinity::ScopedCore scoped(cores, CoreAffinity::Who::kCaller, CPU_SETSIZE);
  Sleeper sleeper(cores);
  const cpu_set_t there = sleeper.AllowedThere();
  CHECK(CPU_EQUAL(&there, &before));
}

TEST(AThreadIsWokenAnywhereWhereEveryCoreIsTaken) {
  const cpu_set_t before = Allowed();
  const cpu_set_t only = Only(sched_getcpu());
  CoreAffinity cores;
  Sleeper sleeper(cores);
  CHECK(sched_setaffinity(0, sizeof(only), &only) == 0);
  {
    const CoreAffinity::ScopedCore scoped(cores, CoreAffinity::Who::kCaller,
                                          CPU_SETSIZE);
    cores.AssignIdleCores(sleeper.thread());
    const cpu_set_t there = sleeper.AllowedThere();
    CHECK(CPU_EQUAL(&there, &before));
  }
  sched_setaffinity(0, sizeof(before), &before);
}

}  // namespace
}  // namespace jax_ub

CHECK_MAIN()
