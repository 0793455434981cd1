// The library's own threads. Two kinds of tasks share them:
//
//   job  independent units of pure computation. At most num_threads() threads are
//        inside jobs at a time, whatever the number of ranks, and a unit never blocks.
//   run  a closure that may block (a rank's schedule, the rest of an XLA program). A
//        run never waits for another one: the crew grows instead, as long as the system
//        lets it. Where it does not, jobs end all the same: a thread that nobody comes
//        after does what is left of them first.
//
// The first thread starts with the crew, so that there is always one for what is queued;
// the others on first use. They never end: nothing may be joined at process exit.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <exception>
#include <functional>
#include <memory>
#include <mutex>
#include <vector>

#include "engine/cores.h"
#include "gemm/cpu/blocking_cache.h"
#include "gemm/scratch.h"
#include "platform/thread.h"

namespace jax_ub {

// Work below this is done by the thread that has it: waking one costs about as much.
inline constexpr double kInlineUs = 50;

class Job {
 public:
  virtual ~Job() = default;
  virtual int64_t num_units() const = 0;
  // Any thread, any order. After a unit threw, those not yet begun are left out.
  virtual void Run(int64_t unit, Scratch& scratch) = 0;
  // Called once, by the last thread out, when it counts as a job's worker no more.
  // `helped`: that thread is the one inside Crew::Help.
  virtual void Done(std::exception_ptr failure, bool helped) = 0;
};

// A job that one thread waits for.
class WaitedJob : public Job {
 public:
  void Done(std::exception_ptr failure, bool helped) override;
  // Throws what a unit threw.
  void Wait();

 private:
  std::mutex mutex_;  // guards the two below
  std::condition_variable changed_;
  bool done_ = false;
  std::exception_ptr failure_;
};

// A failure of runs that wait for each other: where that was a deadline, and only so many
// had found a thread to wait in, it says so, too.
std::exception_ptr WithShortage(const std::exception_ptr& failure,
                                int num_begun,
                                int num_runs);

class Crew {
 public:
  // Throws SystemError where not even one thread can be started.
  explicit Crew(int num_threads);
  ~Crew() = delete;  // its threads never end

  // Starts a run.
  void Start(std::function<void()> run);

  // Works on the job with this thread, if fewer than num_threads() are busy, and with
  // the crew; returns when no unit is left to begin, not when all are done.
  void Help(std::shared_ptr<Job> job);

  // All units on this thread, then Done(failure, true): cheaper than waking others.
  void RunInline(Job& job);

  // Help, then Wait. Only from a run, or another thread that may block.
  void RunAndWait(const std::shared_ptr<WaitedJob>& job);

  // `cores`: where they compute; none: wherever they may run.
  void set_num_threads(int num_threads, const std::vector<int>& cores = {});
  std::vector<int> part() const { return cores_.part(); }
  int num_threads() const { return num_threads_.load(std::memory_order_relaxed); }

  // The threads that compute a product, for its plan.
  Workers workers() { return {num_threads(), &blockings_}; }
  const BlockingCache& blockings() const { return blockings_; }

  // Memory that all threads together hold to pack operands into.
  int64_t scratch_bytes() const { return scratch_bytes_.load(); }

 private:
  struct Posted;  // a job in the queue
  struct Member;  // a thread

  void Loop();
  std::exception_ptr RunUnits(Posted& posted, Scratch& scratch);
  void Leave(const std::shared_ptr<Posted>& posted,
             const std::exception_ptr& failure,
             bool helped);
  // All three unlock. Summon returns false where nobody is idle, and no thread starts.
  bool Summon(std::unique_lock<std::mutex>& lock);
  void LeaveRest(std::unique_lock<std::mutex>& lock);
  void Work(std::unique_lock<std::mutex>& lock, Scratch& scratch);
  bool HasJob() const;
  bool HasWork() const;
  void Idle(std::unique_lock<std::mutex>& lock, Member& member);
  std::unique_ptr<Scratch> TakeScratch();
  void GiveScratch(std::unique_ptr<Scratch> scratch);

  const SignalMask signal_mask_;  // of all threads, whoever starts them
  std::atomic<int> num_threads_;
  std::atomic<int64_t> scratch_bytes_{0};
  BlockingCache blockings_;

  mutable std::mutex mutex_;  // guards all below
  std::deque<std::function<void()>> runs_;
  std::deque<std::shared_ptr<Posted>> jobs_;
  // The idle threads, each in one of these:
  Member* spinning_ = nullptr;   // looks at the queues, and needs no wake-up
  int num_called_ = 0;           // on their way, new ones included
  std::vector<Member*> asleep_;  // the last to fall asleep last
  int num_in_jobs_ = 0;          // threads inside jobs, helpers included
  std::vector<std::unique_ptr<Scratch>> scratches_;

  Cores cores_;  // where the threads inside jobs compute

  std::atomic<int> calls_{0};  // bumped with every task, for those that spin
};

}  // namespace jax_ub
