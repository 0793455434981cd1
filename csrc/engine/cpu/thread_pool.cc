#include "engine/cpu/thread_pool.h"

#include <algorithm>
#include <thread>
#include <utility>

#include "platform/error.h"
#include "platform/futex.h"

namespace jax_ub {

namespace {

// Maximum number of sleeping threads that a thread wakes before it starts to work. Each
// woken thread wakes further threads.
constexpr int kMaxWakes = 2;
// Number of times that an idle thread polls for work before it sleeps. The polls bridge
// the gaps in a sequence of small calls. Every poll yields the core. With more polls,
// idle threads of several processes would yield to each other and slow down the
// computing threads.
constexpr int kIdleSpins = 5;

}  // namespace

int WorkersFor(double estimated_us) {
  return static_cast<int>(std::clamp(estimated_us / kGrainUs, 1.0,
                                     double{std::numeric_limits<int>::max()}));
}

ParallelJob::ParallelJob(int64_t num_units,
                         RunUnit run_unit,
                         double estimated_us,
                         Done done)
    : num_units_(num_units),
      run_unit_(std::move(run_unit)),
      max_workers_(WorkersFor(estimated_us)),
      done_(std::move(done)) {}

void ParallelJob::Finish(bool participated) noexcept {
  if (done_) return done_(failure_, participated);
  std::lock_guard lock(mutex_);
  is_finished_ = true;
  finished_.notify_all();
}

void ParallelJob::Wait() {
  std::unique_lock lock(mutex_);
  finished_.wait(lock, [this] { return is_finished_; });
  if (failure_) std::rethrow_exception(failure_);
}

struct ThreadPool::Worker {
  explicit Worker(CoreAffinity& cores) : thread(cores) {}

  void Sleep() {
    while (is_woken.load(std::memory_order_acquire) == 0) {
      FutexWait(is_woken, 0, Deadline::Clock::time_point::max());
    }
    is_woken.store(0, std::memory_order_relaxed);
  }

  void Wake() {
    is_woken.store(1, std::memory_order_release);
    FutexWake(is_woken);
  }

  CoreAffinity::Thread thread;
  std::atomic<uint32_t> is_woken{0};
  Worker* next = nullptr;  // guarded by ThreadPool::mutex_
};

// Scratch memory for packed GEMM operands that a thread borrows from the pool. A thread
// of XLA that runs work units must borrow it, because only the workers of the pool have
// their own scratch memory.
class ThreadPool::ScratchLoan {
 public:
  explicit ScratchLoan(ThreadPool& pool) : pool_(pool) {
    std::lock_guard lock(pool.mutex_);
    if (pool.scratches_.empty()) return;
    scratch_ = std::move(pool.scratches_.back());
    pool.scratches_.pop_back();
  }
  ~ScratchLoan() {
    const auto size_bytes = static_cast<int64_t>(scratch_.size_bytes());
    try {
      std::lock_guard lock(pool_.mutex_);
      pool_.scratches_.push_back(std::move(scratch_));
    } catch (...) {
      // Memory is exhausted, so the pool's list of free scratch memory cannot grow. The
      // borrowed scratch memory is freed instead of returned.
      pool_.scratch_bytes_ -= size_bytes;
    }
  }
  ScratchLoan(const ScratchLoan&) = delete;
  ScratchLoan& operator=(const ScratchLoan&) = delete;

  Scratch& get() { return scratch_; }

 private:
  ThreadPool& pool_;
  Scratch scratch_;
};

std::exception_ptr AddThreadShortage(const std::exception_ptr& failure,
                                     int num_begun,
                                     int num_tasks) noexcept {
  if (num_begun == num_tasks) return failure;
  try {
    try {
      std::rethrow_exception(failure);
    } catch (const DeadlineError& error) {
      return std::make_exception_ptr(DeadlineError(
          std::string(error.what()) + " Only " + std::to_string(num_begun) + " of " +
          std::to_string(num_tasks) + " ranks found a thread" + kIsLimitReached));
    }
  } catch (...) {
    return failure;
  }
}

ThreadPool::ThreadPool(int num_threads, int num_cores)
    : num_cores_(std::max(num_cores, 1)), num_threads_(std::max(num_threads, 1)) {
  num_waking_ = 1;
  StartThread([this] { Loop(); }, signal_mask_);
}

void ThreadPool::set_num_threads(int num_threads, const std::vector<int>& cores) {
  core_affinity_.set_cpu_set(cores);
  num_threads_.store(std::max(num_threads, 1), std::memory_order_relaxed);
}

// Returns how many more threads the queued work could use. Each queued BlockingTask
// needs one thread. Each job can use as many threads as may still join it. Requires
// `mutex_`.
int64_t ThreadPool::NumWanted() const {
  int64_t wanted = tasks_.size();
  int64_t places = num_workers() - num_in_jobs_;
  jobs_.Find([&](const ParallelJob& job) {
    // A job without units still needs one worker, which calls ParallelJob::Finish.
    const int64_t least = job.num_workers_ == 0 ? 1 : 0;
    const int64_t left = std::min<int64_t>(job.num_units_ - job.next_unit_.load(),
                                           job.max_workers_ - job.num_workers_);
    const int64_t joining =
        std::clamp<int64_t>(std::max(left, least), 0, std::max<int64_t>(places, 0));
    wanted += joining;
    places -= joining;
    return places <= 0;
  });
  return wanted;
}

// Wakes or starts threads until each queued BlockingTask has a thread, and each job has
// as many threads as it can use. The calling thread wakes at most kMaxWakes threads;
// these threads wake the others.
bool ThreadPool::WakeWorkers(std::unique_lock<std::mutex>& lock) noexcept {
  const int64_t num_wanted = NumWanted();
  if (num_wanted == 0) {
    lock.unlock();
    return true;
  }
  const int64_t most = std::max(num_workers(), kMaxWakes);
  int wanted = static_cast<int>(
      std::clamp<int64_t>(std::min(num_wanted, most) - num_waking_, 0, kMaxWakes));
  num_submitted_.fetch_add(1, std::memory_order_release);
  Worker* const spinning = wanted > 0 ? spinning_ : nullptr;
  if (spinning) --wanted;
  Worker* called = nullptr;  // linked list
  for (; wanted > 0 && asleep_ != nullptr; --wanted) {
    Worker* const worker = asleep_;
    asleep_ = worker->next;
    worker->next = called;
    called = worker;
    ++num_waking_;
  }
  int num_new = wanted;
  num_waking_ += num_new;
  const bool to_compute = !jobs_.empty();
  lock.unlock();
  if (spinning && to_compute) core_affinity_.AssignIdleCores(spinning->thread);
  while (called != nullptr) {
    Worker* const worker = called;
    // `next` is read before the worker wakes, because the worker changes it when it
    // sleeps again.
    called = worker->next;
    if (to_compute) core_affinity_.AssignIdleCores(worker->thread);
    worker->Wake();
  }
  try {
    for (; num_new > 0; --num_new) StartThread([this] { Loop(); }, signal_mask_);
  } catch (...) {
    // The system limits threads or memory, so no thread can be started, and existing
    // threads must do the work. If a thread has gone to sleep while the lock was not
    // held, it is woken.
    lock.lock();
    num_waking_ -= num_new;
    if (asleep_ != nullptr) return WakeWorkers(lock);
    lock.unlock();
    return false;
  }
  return true;
}

// Ensures that queued jobs run although the calling thread is about to exit or block.
// If no worker can be woken or started, the calling thread runs the jobs, which never
// block.
void ThreadPool::RunLeftoverJobs(std::unique_lock<std::mutex>& lock) noexcept {
  while (!WakeWorkers(lock)) {
    {
      ScratchLoan scratch(*this);  // acquired and released while the lock is not held
      lock.lock();
      const std::shared_ptr<ParallelJob> job = FindJob();
      if (!job) {
        lock.unlock();
        return;
      }
      RunJob(lock, job, scratch.get(), nullptr);
    }
    lock.lock();
  }
}

void ThreadPool::SubmitBlocking(Queue<BlockingTask> tasks) noexcept {
  std::unique_lock lock(mutex_);
  tasks_.Append(std::move(tasks));
  WakeWorkers(lock);
}

void ThreadPool::SubmitBlocking(std::shared_ptr<BlockingTask> task) noexcept {
  Queue<BlockingTask> tasks;
  tasks.Push(std::move(task));
  SubmitBlocking(std::move(tasks));
}

void ThreadPool::SubmitBlocking(std::function<void()> task) {
  SubmitBlocking(std::make_shared<Closure>(std::move(task)));
}

void ThreadPool::Participate(std::shared_ptr<ParallelJob> job) noexcept {
  std::unique_lock lock(mutex_);
  jobs_.Push(job);
  if (num_in_jobs_ >= num_workers()) {
    WakeWorkers(lock);
    return;
  }
  ++num_in_jobs_;
  ++job->num_workers_;
  const int64_t unit = job->next_unit_.fetch_add(1);
  lock.unlock();
  std::exception_ptr failure;
  {
    // The core is reserved before workers wake, so that they are placed on other cores.
    const CoreAffinity::ScopedCore core(core_affinity_, CoreAffinity::Who::kCaller,
                                        num_workers());
    lock.lock();
    WakeWorkers(lock);
    ScratchLoan scratch(*this);
    failure = RunUnits(*job, unit, scratch.get());
  }
  LeaveJob(job, failure, true);
}

void ThreadPool::RunInline(ParallelJob& job) noexcept {
  std::exception_ptr failure;
  {
    ScratchLoan scratch(*this);
    failure = RunUnits(job, job.next_unit_.fetch_add(1), scratch.get());
  }
  job.failure_ = failure;
  job.Finish(true);
}

// Runs units of the job, beginning with `unit`, until no unit is left to begin. The
// calling thread is already counted in num_workers_.
std::exception_ptr ThreadPool::RunUnits(ParallelJob& job,
                                        int64_t unit,
                                        Scratch& scratch) noexcept {
  const size_t held_bytes = scratch.size_bytes();
  std::exception_ptr failure;
  for (; unit < job.num_units_; unit = job.next_unit_.fetch_add(1)) {
    try {
      job.run_unit_(unit, scratch);
    } catch (...) {
      failure = std::current_exception();
      job.next_unit_.store(job.num_units_);
    }
  }
  scratch_bytes_ += static_cast<int64_t>(scratch.size_bytes() - held_bytes);
  return failure;
}

void ThreadPool::LeaveJob(const std::shared_ptr<ParallelJob>& job,
                          const std::exception_ptr& failure,
                          bool participated) noexcept {
  std::unique_lock lock(mutex_);
  if (!job->is_exhausted_) {
    job->is_exhausted_ = true;  // no further worker may join
    jobs_.Remove(job.get());
  }
  if (failure && !job->failure_) job->failure_ = failure;
  --num_in_jobs_;
  const bool last = --job->num_workers_ == 0;
  if (participated && !jobs_.empty()) {
    RunLeftoverJobs(lock);  // another worker may now compute instead of this one
  } else {
    lock.unlock();
  }
  if (last) job->Finish(participated);
}

void ThreadPool::RunJob(std::unique_lock<std::mutex>& lock,
                        const std::shared_ptr<ParallelJob>& job,
                        Scratch& scratch,
                        CoreAffinity::Thread* self) noexcept {
  ++num_in_jobs_;
  ++job->num_workers_;
  const int64_t unit = job->next_unit_.fetch_add(1);
  WakeWorkers(lock);
  if (self != nullptr) core_affinity_.SetBusy(*self);
  std::exception_ptr failure;
  {
    const CoreAffinity::ScopedCore core(core_affinity_, CoreAffinity::Who::kWorker,
                                        num_workers());
    failure = RunUnits(*job, unit, scratch);
  }
  LeaveJob(job, failure, false);
}

// Returns a job that another worker may join, or nullptr. One worker must also join a
// job without units, to call its Finish.
std::shared_ptr<ParallelJob> ThreadPool::FindJob() const {
  if (num_in_jobs_ >= num_workers()) return nullptr;
  return jobs_.Find([](const ParallelJob& job) {
    return job.num_workers_ == 0 || (job.num_workers_ < job.max_workers_ &&
                                     job.next_unit_.load() < job.num_units_);
  });
}

bool ThreadPool::HasWork() const { return !tasks_.empty() || FindJob() != nullptr; }

// Polls briefly for work, then sleeps. `lock` is held on entry and exit. Only one
// thread polls at a time, because more polling threads would take cores from the
// computing threads.
void ThreadPool::WaitForWork(std::unique_lock<std::mutex>& lock,
                             Worker& worker) noexcept {
  while (!HasWork()) {
    if (!spinning_) {
      spinning_ = &worker;
      const int seen = num_submitted_.load(std::memory_order_relaxed);
      lock.unlock();
      for (int i = 0;
           i < kIdleSpins && num_submitted_.load(std::memory_order_acquire) == seen;
           ++i) {
        std::this_thread::yield();
      }
      lock.lock();
      spinning_ = nullptr;
      if (HasWork()) return;
    }
    worker.next = asleep_;
    asleep_ = &worker;
    lock.unlock();
    worker.Sleep();
    lock.lock();
    --num_waking_;
  }
}

void ThreadPool::Loop() noexcept {
  Worker worker(core_affinity_);
  Scratch scratch;
  std::unique_lock lock(mutex_);
  --num_waking_;
  for (;;) {
    WaitForWork(lock, worker);
    if (!tasks_.empty()) {
      const std::shared_ptr<BlockingTask> task = tasks_.Pop();
      RunLeftoverJobs(lock);  // this thread may block for a long time
      core_affinity_.Release(worker.thread);
      task->Execute();
    } else if (const std::shared_ptr<ParallelJob> job = FindJob()) {
      RunJob(lock, job, scratch, &worker.thread);
    } else {
      continue;  // other workers took the last units while the lock was not held
    }
    core_affinity_.SetIdle(worker.thread);
    lock.lock();
  }
}

void ThreadPool::ParallelFor(int64_t num_units,
                             ParallelJob::RunUnit run_unit,
                             double estimated_us) {
  if (estimated_us < kMaxInlineUs) {
    ParallelJob job(num_units, std::move(run_unit));
    RunInline(job);
    return job.Wait();
  }
  const auto job =
      std::make_shared<ParallelJob>(num_units, std::move(run_unit), estimated_us);
  Participate(job);
  job->Wait();
}

}  // namespace jax_ub
