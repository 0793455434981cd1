#include "engine/crew.h"

#include <algorithm>
#include <thread>
#include <utility>

#include "platform/error.h"
#include "platform/futex.h"

namespace jax_ub {

namespace {

// An idle thread looks this often before it sleeps: long enough for the next call of a
// chain of small ones. Every look yields its core to whoever can use it, and where that is
// another idle thread, of a process that has the same core, both are in the way of those
// that work.
constexpr int kLooks = 5;
// How many threads one thread wakes before it works itself.
constexpr int kMaxWakes = 2;

}  // namespace

Job::Job(double estimated_us)
    : max_workers_(static_cast<int>(std::clamp(
          estimated_us / kGrainUs, 1.0, double{std::numeric_limits<int>::max()}))) {}

void WaitedJob::Done(std::exception_ptr failure, bool helped) noexcept {
  std::lock_guard lock(mutex_);
  failure_ = std::move(failure);
  done_ = true;
  changed_.notify_all();
}

void WaitedJob::Wait() {
  std::unique_lock lock(mutex_);
  changed_.wait(lock, [this] { return done_; });
  if (failure_) std::rethrow_exception(failure_);
}

struct Crew::Member {
  explicit Member(Cores& cores) : thread(cores) {}

  void Sleep() {
    while (is_called.load(std::memory_order_acquire) == 0) {
      FutexWait(is_called, 0, Deadline::Clock::time_point::max());
    }
    is_called.store(0, std::memory_order_relaxed);
  }

  void Wake() {
    is_called.store(1, std::memory_order_release);
    FutexWake(is_called);
  }

  Cores::Thread thread;
  std::atomic<uint32_t> is_called{0};
  Member* next = nullptr;  // guarded by Crew::mutex_
};

// Memory of the crew for a thread that is not its own.
class Crew::ScratchLoan {
 public:
  explicit ScratchLoan(Crew& crew) : crew_(crew) {
    std::lock_guard lock(crew.mutex_);
    if (crew.scratches_.empty()) return;
    scratch_ = std::move(crew.scratches_.back());
    crew.scratches_.pop_back();
  }
  ~ScratchLoan() {
    const auto size_bytes = static_cast<int64_t>(scratch_.size_bytes());
    try {
      std::lock_guard lock(crew_.mutex_);
      crew_.scratches_.push_back(std::move(scratch_));
    } catch (...) {
      crew_.scratch_bytes_ -= size_bytes;  // no memory to keep it: it is freed
    }
  }
  ScratchLoan(const ScratchLoan&) = delete;
  ScratchLoan& operator=(const ScratchLoan&) = delete;

  Scratch& get() { return scratch_; }

 private:
  Crew& crew_;
  Scratch scratch_;
};

std::exception_ptr WithShortage(const std::exception_ptr& failure,
                                int num_begun,
                                int num_runs) noexcept {
  if (num_begun == num_runs) return failure;
  try {
    try {
      std::rethrow_exception(failure);
    } catch (const DeadlineError& error) {
      return std::make_exception_ptr(DeadlineError(
          std::string(error.what()) + " Only " + std::to_string(num_begun) + " of " +
          std::to_string(num_runs) + " ranks found a thread" + kIsLimitReached));
    }
  } catch (...) {
    return failure;
  }
}

Crew::Crew(int num_threads, int num_cores)
    : num_cores_(std::max(num_cores, 1)), num_threads_(std::max(num_threads, 1)) {
  num_called_ = 1;
  StartThread([this] { Loop(); }, signal_mask_);
}

void Crew::set_num_threads(int num_threads, const std::vector<int>& cores) {
  cores_.set_part(cores);
  num_threads_.store(std::max(num_threads, 1), std::memory_order_relaxed);
}

// How many threads would find something to do.
int64_t Crew::NumWanted() const {
  int64_t wanted = runs_.size();
  int64_t places = num_workers() - num_in_jobs_;
  jobs_.Find([&](const Job& job) {
    const int64_t least = job.num_workers_ == 0 ? 1 : 0;  // also of no units
    const int64_t left = std::min<int64_t>(job.end_ - job.next_unit_.load(),
                                           job.max_workers_ - job.num_workers_);
    const int64_t joining =
        std::clamp<int64_t>(std::max(left, least), 0, std::max<int64_t>(places, 0));
    wanted += joining;
    places -= joining;
    return places <= 0;
  });
  return wanted;
}

// Makes sure that somebody comes for every queued run and for every free place in a job:
// wakes up to kMaxWakes threads, who summon the others.
bool Crew::Summon(std::unique_lock<std::mutex>& lock) noexcept {
  const int64_t num_wanted = NumWanted();
  if (num_wanted == 0) {
    lock.unlock();
    return true;
  }
  const int64_t most = std::max(num_workers(), kMaxWakes);
  int wanted = static_cast<int>(
      std::clamp<int64_t>(std::min(num_wanted, most) - num_called_, 0, kMaxWakes));
  calls_.fetch_add(1, std::memory_order_release);
  Member* const spinning = wanted > 0 ? spinning_ : nullptr;
  if (spinning) --wanted;
  Member* called = nullptr;  // a list
  for (; wanted > 0 && asleep_ != nullptr; --wanted) {
    Member* const member = asleep_;
    asleep_ = member->next;
    member->next = called;
    called = member;
    ++num_called_;
  }
  int num_new = wanted;
  num_called_ += num_new;
  const bool to_compute = !jobs_.empty();
  lock.unlock();
  if (spinning && to_compute) cores_.KeepApart(spinning->thread);
  while (called != nullptr) {
    Member* const member = called;
    called = member->next;  // before it runs, and may sleep again
    if (to_compute) cores_.KeepApart(member->thread);
    member->Wake();
  }
  try {
    for (; num_new > 0; --num_new) StartThread([this] { Loop(); }, signal_mask_);
  } catch (...) {
    // The system's limit of threads or memory. The work is left to the threads there
    // are. One of them may sleep because those who do not come were on their way.
    lock.lock();
    num_called_ -= num_new;
    if (asleep_ != nullptr) return Summon(lock);
    lock.unlock();
    return false;
  }
  return true;
}

// Somebody comes for what is queued; where nobody does, this thread, which is about to
// leave, or to do what may wait for a job, does the jobs: they never block.
void Crew::LeaveRest(std::unique_lock<std::mutex>& lock) noexcept {
  while (!Summon(lock)) {
    {
      ScratchLoan scratch(*this);  // taken and given back without the lock
      lock.lock();
      const std::shared_ptr<Job> job = FindJob();
      if (!job) {
        lock.unlock();
        return;
      }
      Work(lock, job, scratch.get(), nullptr);
    }
    lock.lock();
  }
}

void Crew::Start(Queue<Run> runs) noexcept {
  std::unique_lock lock(mutex_);
  runs_.Append(std::move(runs));
  Summon(lock);
}

void Crew::Start(std::shared_ptr<Run> run) noexcept {
  Queue<Run> runs;
  runs.Push(std::move(run));
  Start(std::move(runs));
}

void Crew::Start(std::function<void()> run) {
  Start(std::make_shared<Closure>(std::move(run)));
}

void Crew::Help(std::shared_ptr<Job> job) noexcept {
  job->end_ = job->num_units();
  std::unique_lock lock(mutex_);
  jobs_.Push(job);
  if (num_in_jobs_ >= num_workers()) {
    Summon(lock);
    return;
  }
  ++num_in_jobs_;
  ++job->num_workers_;
  const int64_t unit = job->next_unit_.fetch_add(1);
  lock.unlock();
  std::exception_ptr failure;
  {
    // First, so that those who come keep off this core.
    const Cores::Seat seat(cores_, Cores::Who::kCaller, num_workers());
    lock.lock();
    Summon(lock);
    ScratchLoan scratch(*this);
    failure = RunUnits(*job, unit, scratch.get());
  }
  Leave(job, failure, true);
}

void Crew::RunInline(Job& job) noexcept {
  std::exception_ptr failure;
  {
    job.end_ = job.num_units();
    ScratchLoan scratch(*this);
    failure = RunUnits(job, job.next_unit_.fetch_add(1), scratch.get());
  }
  job.Done(failure, true);
}

// The caller is already counted as a worker of the job, and `unit` is its first one.
std::exception_ptr Crew::RunUnits(Job& job, int64_t unit, Scratch& scratch) noexcept {
  const size_t held_bytes = scratch.size_bytes();
  std::exception_ptr failure;
  for (; unit < job.end_; unit = job.next_unit_.fetch_add(1)) {
    try {
      job.Run(unit, scratch);
    } catch (...) {
      failure = std::current_exception();
      job.next_unit_.store(job.end_);
    }
  }
  scratch_bytes_ += static_cast<int64_t>(scratch.size_bytes() - held_bytes);
  return failure;
}

void Crew::Leave(const std::shared_ptr<Job>& job,
                 const std::exception_ptr& failure,
                 bool helped) noexcept {
  std::unique_lock lock(mutex_);
  if (!job->is_exhausted_) {
    job->is_exhausted_ = true;  // nobody joins any more
    jobs_.Remove(job.get());
  }
  if (failure && !job->failure_) job->failure_ = failure;
  --num_in_jobs_;
  const bool last = --job->num_workers_ == 0;
  if (helped && !jobs_.empty()) {
    LeaveRest(lock);  // the place that this thread leaves
  } else {
    lock.unlock();
  }
  if (last) job->Done(job->failure_, helped);
}

void Crew::Work(std::unique_lock<std::mutex>& lock,
                const std::shared_ptr<Job>& job,
                Scratch& scratch,
                Cores::Thread* self) noexcept {
  ++num_in_jobs_;
  ++job->num_workers_;
  const int64_t unit = job->next_unit_.fetch_add(1);
  Summon(lock);
  if (self != nullptr) cores_.SetBusy(*self);
  std::exception_ptr failure;
  {
    const Cores::Seat seat(cores_, Cores::Who::kCrew, num_workers());
    failure = RunUnits(*job, unit, scratch);
  }
  Leave(job, failure, false);
}

// A job without units needs a worker as well, who says that it is done.
std::shared_ptr<Job> Crew::FindJob() const {
  if (num_in_jobs_ >= num_workers()) return nullptr;
  return jobs_.Find([](const Job& job) {
    return job.num_workers_ == 0 ||
           (job.num_workers_ < job.max_workers_ && job.next_unit_.load() < job.end_);
  });
}

bool Crew::HasWork() const { return !runs_.empty() || FindJob() != nullptr; }

// Spins a little, then sleeps, until there is work. The lock is held on entry and exit.
// One thread spins at a time: more would only take the cores from those that work.
void Crew::Idle(std::unique_lock<std::mutex>& lock, Member& member) noexcept {
  while (!HasWork()) {
    if (!spinning_) {
      spinning_ = &member;
      const int seen = calls_.load(std::memory_order_relaxed);
      lock.unlock();
      for (int i = 0; i < kLooks && calls_.load(std::memory_order_acquire) == seen;
           ++i) {
        std::this_thread::yield();
      }
      lock.lock();
      spinning_ = nullptr;
      if (HasWork()) return;
    }
    member.next = asleep_;
    asleep_ = &member;
    lock.unlock();
    member.Sleep();
    lock.lock();
    --num_called_;
  }
}

void Crew::Loop() noexcept {
  Member member(cores_);
  Scratch scratch;
  std::unique_lock lock(mutex_);
  --num_called_;
  for (;;) {
    Idle(lock, member);
    if (!runs_.empty()) {
      const std::shared_ptr<Run> run = runs_.Pop();
      LeaveRest(lock);  // this thread may be gone for long
      cores_.Release(member.thread);
      run->Execute();
    } else if (const std::shared_ptr<Job> job = FindJob()) {
      Work(lock, job, scratch, &member.thread);
    } else {
      continue;  // its workers took the last units meanwhile, without the lock
    }
    cores_.SetIdle(member.thread);
    lock.lock();
  }
}

void Crew::RunAndWait(const std::shared_ptr<WaitedJob>& job) {
  Help(job);
  job->Wait();
}

}  // namespace jax_ub
