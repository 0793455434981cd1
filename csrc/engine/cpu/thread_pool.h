// The library's thread pool. It runs two kinds of tasks.
//
// A job (ParallelJob) consists of independent units of pure computation, which never
// block. At most num_workers() threads run units at a time, for any number of ranks.
//
// A BlockingTask may block, such as a rank's schedule or the continuation of an XLA
// program. It never queues behind another one: the pool starts a thread for it, up to
// the system's limit. At that limit, jobs still complete, because a thread that cannot
// wake another thread completes the queued jobs before it blocks.
//
// Waking a thread takes as long as tens of microseconds of work. Therefore a thread
// wakes at most two other threads and then starts its first unit. Each of these threads
// wakes two more if there is work for them.
//
// The first thread starts with the pool, so that a queued task always has a thread. The
// other threads start on first use. Threads never exit, because no thread may be joined
// at process exit.
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

#include "engine/cpu/core_affinity.h"
#include "engine/cpu/queue.h"
#include "gemm/cpu/blocking.h"
#include "gemm/scratch.h"
#include "platform/thread.h"

namespace jax_ub {

// Work that takes less than this time (in microseconds, on one thread) runs on the
// calling thread, because waking another thread takes as long.
inline constexpr double kMaxInlineUs = 50;
// A thread is woken only if there is work for it that takes at least this time, in
// microseconds.
inline constexpr double kGrainUs = kMaxInlineUs / 2;

// Returns the number of threads to use for work that takes `estimated_us` on one
// thread. Each thread gets at least kGrainUs of work.
int WorkersFor(double estimated_us);

// Independent work units that threads of the pool run in any order, and a function that
// runs after the last unit.
class ParallelJob : public Queued<ParallelJob> {
 public:
  // Runs one unit. If it throws an exception, units that have not begun are skipped.
  using RunUnit = std::function<void(int64_t unit, Scratch& scratch)>;
  // Called once, by the last thread that leaves the job. `participated` is true if that
  // thread called Participate or RunInline. Must not throw.
  using Done =
      std::function<void(const std::exception_ptr& failure, bool participated)>;

  // `estimated_us` is the run time of all units on one thread. At most
  // WorkersFor(estimated_us) threads run the job. Wait must not be called on a job with
  // `done`.
  ParallelJob(int64_t num_units,
              RunUnit run_unit,
              double estimated_us = std::numeric_limits<double>::infinity(),
              Done done = nullptr);

  // Waits until all units have ended. Rethrows the exception of a unit.
  void Wait();

 private:
  friend class ThreadPool;

  void Finish(bool participated) noexcept;

  const int64_t num_units_;
  const RunUnit run_unit_;
  const int max_workers_;
  const Done done_;
  std::atomic<int64_t> next_unit_{0};

  // The next three members are guarded by ThreadPool::mutex_. They do not change after
  // the last worker has left the job.
  int num_workers_ = 0;
  bool is_exhausted_ = false;
  std::exception_ptr failure_;

  std::mutex mutex_;  // guards `is_finished_`
  std::condition_variable finished_;
  bool is_finished_ = false;
};

// Returns `failure`, the error of a call whose tasks wait for each other. If the error
// is a DeadlineError, and fewer than `num_tasks` tasks had a thread, the message says
// that only `num_begun` tasks had one.
std::exception_ptr AddThreadShortage(const std::exception_ptr& failure,
                                     int num_begun,
                                     int num_tasks) noexcept;

class ThreadPool {
 public:
  // Starts the first thread of the pool. At most `num_cores` threads compute at a time.
  // Throws SystemError if the thread cannot be started.
  explicit ThreadPool(int num_threads, int num_cores = NumAllowedCores());
  ~ThreadPool() = delete;  // its threads never exit

  // Queues tasks that may block, and wakes or starts threads for them. The tasks start
  // in the order of the queue.
  void SubmitBlocking(Queue<BlockingTask> tasks) noexcept;
  void SubmitBlocking(std::shared_ptr<BlockingTask> task) noexcept;
  void SubmitBlocking(std::function<void()> task);  // throws std::bad_alloc

  // Queues the job, and wakes workers. Unless num_workers() threads already compute,
  // the calling thread also runs units. Returns when no unit is left to begin, but
  // other threads may still be running units. Must be called at most once per job.
  void Participate(std::shared_ptr<ParallelJob> job) noexcept;

  // Runs all units on the calling thread, which is cheaper than waking workers.
  void RunInline(ParallelJob& job) noexcept;

  // Runs the units of a job and waits for them. If they take less than kMaxInlineUs,
  // the calling thread runs all of them. Otherwise, other threads also run units, as in
  // Participate. The calling thread must be allowed to block. Rethrows the exception of
  // a unit.
  void ParallelFor(int64_t num_units,
                   ParallelJob::RunUnit run_unit,
                   double estimated_us = std::numeric_limits<double>::infinity());

  // Sets the number of threads that compute at a time, and the cores on which they run.
  // With empty `cores`, they run on all cores that the process may use.
  void set_num_threads(int num_threads, const std::vector<int>& cores = {});
  std::vector<int> cpu_set() const { return core_affinity_.cpu_set(); }
  int num_threads() const { return num_threads_.load(std::memory_order_relaxed); }
  // Returns the number of threads that may compute at a time. It is at most the number
  // of cores, because more threads would only take turns on the cores.
  int num_workers() const { return std::min(num_threads(), num_cores_); }

  // Returns what PlanGemm needs to plan a GEMM for this pool: the number of threads,
  // and the pool's cache of GEMM blockings.
  Workers workers() { return {num_workers(), &blockings_}; }
  const BlockingCache& blockings() const { return blockings_; }

  // Returns the size of the memory in which the threads pack (copy and reorder) GEMM
  // operands.
  int64_t scratch_bytes() const { return scratch_bytes_.load(); }

 private:
  struct Worker;  // one thread of the pool
  class ScratchLoan;

  void Loop() noexcept;
  std::exception_ptr RunUnits(ParallelJob& job,
                              int64_t unit,
                              Scratch& scratch) noexcept;
  void LeaveJob(const std::shared_ptr<ParallelJob>& job,
                const std::exception_ptr& failure,
                bool participated) noexcept;
  // Wakes threads for the queued work, and unlocks `lock`. Returns false if some work
  // needs another thread, but no thread is idle and none can be started.
  bool WakeWorkers(std::unique_lock<std::mutex>& lock) noexcept;
  // Calls WakeWorkers, which unlocks `lock`. If it returns false, runs the queued jobs
  // on the calling thread.
  void RunLeftoverJobs(std::unique_lock<std::mutex>& lock) noexcept;
  // Runs units of a job and unlocks `lock`. `self` is null if the calling thread is not
  // a thread of the pool.
  void RunJob(std::unique_lock<std::mutex>& lock,
              const std::shared_ptr<ParallelJob>& job,
              Scratch& scratch,
              CoreAffinity::Thread* self) noexcept;
  int64_t NumWanted() const;
  std::shared_ptr<ParallelJob> FindJob() const;
  bool HasWork() const;
  void WaitForWork(std::unique_lock<std::mutex>& lock, Worker& worker) noexcept;

  // The signal mask of the thread that creates the pool. All threads of the pool get
  // this mask.
  const SignalMask signal_mask_;
  const int num_cores_;
  std::atomic<int> num_threads_;
  std::atomic<int64_t> scratch_bytes_{0};
  BlockingCache blockings_;

  // Guards the members below. No system call is made while it is held.
  mutable std::mutex mutex_;
  Queue<BlockingTask> tasks_;
  Queue<ParallelJob> jobs_;
  // The idle threads. Each idle thread is in exactly one of the next three members.
  Worker* spinning_ = nullptr;  // polls the queues; needs no wake-up
  int num_waking_ = 0;          // woken or being started, not running yet
  Worker* asleep_ = nullptr;    // linked list; the last to fall asleep first
  int num_in_jobs_ = 0;         // threads inside jobs, callers included
  std::vector<Scratch> scratches_;

  CoreAffinity core_affinity_;  // assigns cores to the threads inside jobs

  std::atomic<int> num_submitted_{
      0};  // incremented with every task; polled by the spinning thread
};

}  // namespace jax_ub
