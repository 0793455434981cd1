// The library's own threads. Two kinds of tasks share them:
//
//   job  independent units of pure computation. At most num_workers() threads are
//        inside jobs at a time, whatever the number of ranks, and a unit never blocks.
//   run  a closure that may block (a rank's schedule, the rest of an XLA program). A
//        run never waits for another one: the thread pool grows instead, as long as the system
//        lets it. Where it does not, jobs end all the same: a thread that nobody comes
//        after does what is left of them first.
//
// Waking a thread costs as much as tens of microseconds of work. So a thread wakes two
// others at most and then begins its first unit; each of these wakes two more where there
// is work for them.
//
// The first thread starts with the thread pool, so that there is always one for what is queued;
// the others on first use. They never end: nothing may be joined at process exit.
#pragma once

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <exception>
#include <functional>
#include <limits>
#include <memory>
#include <mutex>
#include <vector>

#include "engine/cpu/blocking_task.h"
#include "engine/cpu/core_affinity.h"
#include "engine/cpu/queue.h"
#include "gemm/cpu/blocking_cache.h"
#include "gemm/scratch.h"
#include "platform/thread.h"

namespace jax_ub {

// Work below this is done by the thread that has it: waking one costs about as much.
inline constexpr double kMaxInlineUs = 50;
// The least work that a thread is woken for.
inline constexpr double kGrainUs = kMaxInlineUs / 2;

class Job : public Queued<Job> {
 public:
  virtual ~Job() = default;
  virtual int64_t num_units() const = 0;
  // Any thread, any order. After a unit threw, those not yet begun are left out.
  virtual void Run(int64_t unit, Scratch& scratch) = 0;
  // Called once, by the last thread out, when it counts as a job's worker no more.
  // `helped`: that thread is the one inside thread pool::Help.
  virtual void Done(std::exception_ptr failure, bool helped) noexcept = 0;

 protected:
  Job() = default;
  // `estimated_us` of one thread: no more threads take part than have kGrainUs each.
  explicit Job(double estimated_us);

 private:
  friend class ThreadPool;

  const int max_workers_ = std::numeric_limits<int>::max();
  int64_t end_ = 0;  // num_units(), from when it is posted
  std::atomic<int64_t> next_unit_{0};

  // Guarded by thread pool::mutex_.
  int num_workers_ = 0;
  bool is_exhausted_ = false;
  std::exception_ptr failure_;
};

// A job that one thread waits for.
class WaitedJob : public Job {
 public:
  WaitedJob() = default;
  explicit WaitedJob(double estimated_us) : Job(estimated_us) {}
  void Done(std::exception_ptr failure, bool helped) noexcept override;
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
std::exception_ptr AddThreadShortage(const std::exception_ptr& failure,
                                     int num_begun,
                                     int num_runs) noexcept;

class ThreadPool {
 public:
  // No more threads compute at a time than there are cores. Throws SystemError where not
  // even one thread can be started.
  explicit ThreadPool(int num_threads, int num_cores = NumAllowedCores());
  ~ThreadPool() = delete;  // its threads never end

  // Starts runs, in their order.
  void SubmitBlocking(Queue<BlockingTask> runs) noexcept;
  void SubmitBlocking(std::shared_ptr<BlockingTask> run) noexcept;
  void SubmitBlocking(std::function<void()> run);  // throws std::bad_alloc

  // Works on the job with this thread, if fewer than num_workers() are busy, and with
  // the thread pool; returns when no unit is left to begin, not when all are done. Once per job.
  void Participate(std::shared_ptr<Job> job) noexcept;

  // All units on this thread, then Done(failure, true): cheaper than waking others.
  void RunInline(Job& job) noexcept;

  // Help, then Wait. Only from a run, or another thread that may block.
  void RunAndWait(const std::shared_ptr<WaitedJob>& job);

  // `cores`: where they compute; none: wherever they may run.
  void set_num_threads(int num_threads, const std::vector<int>& cores = {});
  std::vector<int> cpu_set() const { return core_affinity_.cpu_set(); }
  int num_threads() const { return num_threads_.load(std::memory_order_relaxed); }
  // How many of them compute at a time: more than the cores would only take turns.
  int num_workers() const { return std::min(num_threads(), num_cores_); }

  // The threads that compute a product, for its plan.
  Workers workers() { return {num_workers(), &blockings_}; }
  const BlockingCache& blockings() const { return blockings_; }

  // Memory that all threads together hold to pack operands into.
  int64_t scratch_bytes() const { return scratch_bytes_.load(); }

 private:
  struct Worker;  // a thread
  class ScratchLoan;

  void Loop() noexcept;
  std::exception_ptr RunUnits(Job& job, int64_t unit, Scratch& scratch) noexcept;
  void Leave(const std::shared_ptr<Job>& job,
             const std::exception_ptr& failure,
             bool helped) noexcept;
  // These unlock. WakeWorkers returns false where nobody is idle, and no thread starts.
  bool WakeWorkers(std::unique_lock<std::mutex>& lock) noexcept;
  void RunLeftoverJobs(std::unique_lock<std::mutex>& lock) noexcept;
  // `self`: none of a thread that is not the thread pool's.
  void RunJob(std::unique_lock<std::mutex>& lock,
              const std::shared_ptr<Job>& job,
              Scratch& scratch,
              CoreAffinity::Thread* self) noexcept;
  int64_t NumWanted() const;
  std::shared_ptr<Job> FindJob() const;
  bool HasWork() const;
  void WaitForWork(std::unique_lock<std::mutex>& lock, Worker& member) noexcept;

  const SignalMask signal_mask_;  // of all threads, whoever starts them
  const int num_cores_;
  std::atomic<int> num_threads_;
  std::atomic<int64_t> scratch_bytes_{0};
  BlockingCache blockings_;

  mutable std::mutex mutex_;  // guards all below; no system call is made under it
  Queue<BlockingTask> runs_;
  Queue<Job> jobs_;
  // The idle threads, each in one of these:
  Worker* spinning_ = nullptr;  // looks at the queues, and needs no wake-up
  int num_waking_ = 0;          // on their way, new ones included
  Worker* asleep_ = nullptr;    // a list, the last to fall asleep first
  int num_in_jobs_ = 0;         // threads inside jobs, helpers included
  std::vector<Scratch> scratches_;

  CoreAffinity core_affinity_;  // where the threads inside jobs compute

  std::atomic<int> num_submitted_{0};  // bumped with every task, for those that spin
};

}  // namespace jax_ub
