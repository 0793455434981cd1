// The crew's cores: threads that compute at the same time sit apart.
#include "engine/cores.h"

#include <condition_variable>
#include <memory>
#include <mutex>
#include <optional>
#include <thread>
#include <vector>

#include "check.h"

namespace jax_ub {
namespace {

cpu_set_t Allowed() {
  cpu_set_t allowed;
  sched_getaffinity(0, sizeof(allowed), &allowed);
  return allowed;
}

TEST(SecondThreadOnACoreMovesToAnother) {
  const cpu_set_t before = Allowed();
  if (CPU_COUNT(&before) < 2) return;  // nowhere to move to
  // One thread asks twice, so that both certainly are on the same core.
  Cores cores;
  std::optional<Cores::Seat> first(cores);
  const cpu_set_t alone = Allowed();
  CHECK(CPU_EQUAL(&alone, &before));
  {
    Cores::Seat second(cores);
    const cpu_set_t moved = Allowed();
    CHECK(CPU_COUNT(&moved) == CPU_COUNT(&before) - 1);
    CHECK(CPU_ISSET(sched_getcpu(), &moved));
  }
  const cpu_set_t after = Allowed();
  CHECK(CPU_EQUAL(&after, &before));
}

TEST(ThreadsStayWhereEveryCoreIsTaken) {
  const cpu_set_t before = Allowed();
  cpu_set_t only;
  CPU_ZERO(&only);
  CPU_SET(sched_getcpu(), &only);
  CHECK(sched_setaffinity(0, sizeof(only), &only) == 0);
  Cores cores;
  Cores::Seat first(cores);
  {
    Cores::Seat second(cores);
    const cpu_set_t now = Allowed();
    CHECK(CPU_EQUAL(&now, &only));
  }
  sched_setaffinity(0, sizeof(before), &before);
}

// A thread that sleeps, and says on request where it may run.
class Sleeper {
 public:
  Sleeper() : loop_([this] { Loop(); }) {
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

  Cores::Thread& thread() { return *thread_; }
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
    thread_.emplace();
    changed_.notify_all();
    while (!ends_) {
      changed_.wait(lock, [this] { return asked_ || ends_; });
      if (asked_) allowed_ = Allowed();
      asked_ = false;
      changed_.notify_all();
    }
  }

  std::mutex mutex_;  // guards all below, but for the thread that runs the loop
  std::condition_variable changed_;
  std::optional<Cores::Thread> thread_;
  cpu_set_t allowed_ = {};
  bool asked_ = false;
  bool ends_ = false;
  std::thread loop_;  // last: it uses the others
};

TEST(AThreadIsWokenWhereNobodyComputes) {
  const cpu_set_t before = Allowed();
  if (CPU_COUNT(&before) < 2) return;  // nowhere to be woken
  Cores cores;
  Sleeper sleeper;
  {
    const Cores::Seat seat(cores);
    for (int i = 0; i < 2; ++i) {  // the second time there is nothing to do
      cores.KeepApart(sleeper.thread());
      const cpu_set_t apart = sleeper.AllowedThere();
      CHECK_EQ(CPU_COUNT(&apart), CPU_COUNT(&before) - 1);
      cpu_set_t both;
      CPU_AND(&both, &apart, &before);
      CHECK(CPU_EQUAL(&both, &apart));
    }
  }
  // It stays there, until somebody wakes it who computes elsewhere, or for other things.
  const cpu_set_t kept = sleeper.AllowedThere();
  CHECK_EQ(CPU_COUNT(&kept), CPU_COUNT(&before) - 1);
  cores.Release(sleeper.thread());
  cores.Release(sleeper.thread());
  const cpu_set_t released = sleeper.AllowedThere();
  CHECK(CPU_EQUAL(&released, &before));
}

TEST(AThreadIsWokenAnywhereWhereEveryCoreIsTaken) {
  const cpu_set_t before = Allowed();
  Cores cores;
  Sleeper sleeper;
  // One seat on each core, taken by this thread in turn.
  std::vector<std::unique_ptr<Cores::Seat>> seats;
  for (int core = 0; core < CPU_SETSIZE; ++core) {
    if (!CPU_ISSET(core, &before)) continue;
    if (core > 0) cores.KeepApart(sleeper.thread());
    cpu_set_t only;
    CPU_ZERO(&only);
    CPU_SET(core, &only);
    CHECK(sched_setaffinity(0, sizeof(only), &only) == 0);
    seats.push_back(std::make_unique<Cores::Seat>(cores));
  }
  cores.KeepApart(sleeper.thread());
  const cpu_set_t there = sleeper.AllowedThere();
  CHECK(CPU_EQUAL(&there, &before));
  sched_setaffinity(0, sizeof(before), &before);
}

}  // namespace
}  // namespace jax_ub

CHECK_MAIN()
