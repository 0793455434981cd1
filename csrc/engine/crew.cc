#include "engine/crew.h"

#include <algorithm>
#include <thread>
#include <utility>

#include "platform/error.h"

namespace jax_ub {

namespace {

// An idle thread looks this often before it sleeps: long enough for the next call of a
// chain of small ones. Every look yields its core to whoever can use it, and where that is
// another idle thread, of a process that has the same core, both are in the way of those
// that work.
constexpr int kLooks = 5;

}  // namespace

void WaitedJob::Done(std::exception_ptr failure, bool helped) {
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

struct Crew::Posted {
  explicit Posted(std::shared_ptr<Job> posted)
      : job(std::move(posted)), num_units(job->num_units()) {}

  std::shared_ptr<Job> job;
  const int64_t num_units;
  std::atomic<int64_t> next{0};

  // Guarded by Crew::mutex_.
  int num_workers = 0;
  bool exhausted = false;
  std::exception_ptr failure;
};

struct Crew::Member {
  explicit Member(Cores& cores) : thread(cores) {}

  Cores::Thread thread;
  std::condition_variable wake;
  bool is_called = false;  // guarded by Crew::mutex_
};

std::exception_ptr WithShortage(const std::exception_ptr& failure,
                                int num_begun,
                                int num_runs) {
  if (num_begun == num_runs) return failure;
  try {
    std::rethrow_exception(failure);
  } catch (const DeadlineError& error) {
    return std::make_exception_ptr(DeadlineError(
        std::string(error.what()) + " Only " + std::to_string(num_begun) + " of " +
        std::to_string(num_runs) + " ranks found a thread" + kIsLimitReached));
  } catch (...) {
    return failure;
  }
}

Crew::Crew(int num_threads) : num_threads_(std::max(num_threads, 1)) {
  num_called_ = 1;
  StartThread([this] { Loop(); }, signal_mask_);
}

void Crew::set_num_threads(int num_threads, const std::vector<int>& cores) {
  cores_.set_part(cores);
  num_threads_.store(std::max(num_threads, 1), std::memory_order_relaxed);
}

// Makes sure that somebody comes for every queued run and for every free place in a
// job. No more than num_threads() are on their way at a time: waking one costs more than
// many a run, and whoever comes summons for what it leaves.
bool Crew::Summon(std::unique_lock<std::mutex>& lock) {
  if (!HasWork()) {
    lock.unlock();
    return true;
  }
  int wanted = static_cast<int>(runs_.size());
  for (const auto& posted : jobs_) {
    const int places = num_threads() - num_in_jobs_;
    const int64_t left = posted->num_units - posted->next.load();
    wanted += static_cast<int>(std::clamp<int64_t>(left, 0, std::max(places, 0)));
    if (left >= places) break;
  }
  wanted = std::min(wanted, num_threads()) - num_called_;
  calls_.fetch_add(1, std::memory_order_release);
  Member* const spinning = wanted > 0 ? spinning_ : nullptr;
  if (spinning) --wanted;
  std::vector<Member*> called;
  for (; wanted > 0 && !asleep_.empty(); --wanted) {
    called.push_back(asleep_.back());
    called.back()->is_called = true;
    asleep_.pop_back();
    ++num_called_;
  }
  int num_new = std::max(wanted, 0);
  num_called_ += num_new;
  const bool to_compute = !jobs_.empty();
  // With the lock, without which that thread may already do something else.
  if (spinning && to_compute) cores_.KeepApart(spinning->thread);
  lock.unlock();
  for (Member* member : called) {
    if (to_compute) cores_.KeepApart(member->thread);
    member->wake.notify_one();
  }
  try {
    for (; num_new > 0; --num_new) StartThread([this] { Loop(); }, signal_mask_);
  } catch (const SystemError&) {
    // The work is left to the threads there are. One of them may sleep because those
    // who do not come were on their way.
    lock.lock();
    num_called_ -= num_new;
    if (!asleep_.empty()) return Summon(lock);
    lock.unlock();
    return false;
  }
  return true;
}

// Somebody comes for what is queued; where nobody does, this thread, which is about to
// leave, or to do what may wait for a job, does the jobs: they never block.
void Crew::LeaveRest(std::unique_lock<std::mutex>& lock) {
  while (!Summon(lock)) {
    std::unique_ptr<Scratch> scratch = TakeScratch();
    lock.lock();
    const bool has_job = HasJob();
    if (has_job) {
      Work(lock, *scratch);
    } else {
      lock.unlock();
    }
    GiveScratch(std::move(scratch));
    if (!has_job) return;
    lock.lock();
  }
}

void Crew::Start(std::function<void()> run) {
  std::unique_lock lock(mutex_);
  runs_.push_back(std::move(run));
  Summon(lock);
}

void Crew::Help(std::shared_ptr<Job> job) {
  auto posted = std::make_shared<Posted>(std::move(job));
  std::unique_lock lock(mutex_);
  jobs_.push_back(posted);
  if (num_in_jobs_ >= num_threads()) {
    Summon(lock);
    return;
  }
  ++num_in_jobs_;
  ++posted->num_workers;
  lock.unlock();
  std::exception_ptr failure;
  {
    // First, so that those who come keep off this core.
    const Cores::Seat seat(cores_, Cores::Who::kCaller, num_threads());
    lock.lock();
    Summon(lock);
    std::unique_ptr<Scratch> scratch = TakeScratch();
    failure = RunUnits(*posted, *scratch);
    GiveScratch(std::move(scratch));
  }
  Leave(posted, failure, true);
}

void Crew::RunInline(Job& job) {
  std::unique_ptr<Scratch> scratch = TakeScratch();
  const size_t held_bytes = scratch->size_bytes();
  std::exception_ptr failure;
  try {
    for (int64_t unit = 0; unit < job.num_units(); ++unit) job.Run(unit, *scratch);
  } catch (...) {
    failure = std::current_exception();
  }
  scratch_bytes_ += static_cast<int64_t>(scratch->size_bytes() - held_bytes);
  GiveScratch(std::move(scratch));
  job.Done(failure, true);
}

// The caller is already counted as a worker of the job.
std::exception_ptr Crew::RunUnits(Posted& posted, Scratch& scratch) {
  const size_t held_bytes = scratch.size_bytes();
  std::exception_ptr failure;
  for (int64_t unit; (unit = posted.next.fetch_add(1)) < posted.num_units;) {
    try {
      posted.job->Run(unit, scratch);
    } catch (...) {
      failure = std::current_exception();
      posted.next.store(posted.num_units);
    }
  }
  scratch_bytes_ += static_cast<int64_t>(scratch.size_bytes() - held_bytes);
  return failure;
}

void Crew::Leave(const std::shared_ptr<Posted>& posted,
                 const std::exception_ptr& failure,
                 bool helped) {
  std::unique_lock lock(mutex_);
  if (!posted->exhausted) {
    posted->exhausted = true;  // nobody joins any more
    jobs_.erase(std::find(jobs_.begin(), jobs_.end(), posted));
  }
  if (failure && !posted->failure) posted->failure = failure;
  --num_in_jobs_;
  const bool last = --posted->num_workers == 0;
  if (helped && !jobs_.empty()) {
    LeaveRest(lock);  // the place that this thread leaves
  } else {
    lock.unlock();
  }
  if (last) posted->job->Done(posted->failure, helped);
}

// On the first job.
void Crew::Work(std::unique_lock<std::mutex>& lock, Scratch& scratch) {
  std::shared_ptr<Posted> posted = jobs_.front();
  ++num_in_jobs_;
  ++posted->num_workers;
  Summon(lock);
  std::exception_ptr failure;
  {
    const Cores::Seat seat(cores_, Cores::Who::kCrew, num_threads());
    failure = RunUnits(*posted, scratch);
  }
  Leave(posted, failure, false);
}

bool Crew::HasJob() const { return !jobs_.empty() && num_in_jobs_ < num_threads(); }

bool Crew::HasWork() const { return !runs_.empty() || HasJob(); }

// Spins a little, then sleeps, until there is work. The lock is held on entry and exit.
// One thread spins at a time: more would only take the cores from those that work.
void Crew::Idle(std::unique_lock<std::mutex>& lock, Member& member) {
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
    asleep_.push_back(&member);
    member.wake.wait(lock, [&member] { return member.is_called; });
    member.is_called = false;
    --num_called_;
  }
}

void Crew::Loop() {
  Member member(cores_);
  Scratch scratch;
  std::unique_lock lock(mutex_);
  --num_called_;
  for (;;) {
    Idle(lock, member);
    if (!runs_.empty()) {
      std::function<void()> run = std::move(runs_.front());
      runs_.pop_front();
      LeaveRest(lock);  // this thread may be gone for long
      cores_.Release(member.thread);
      run();
      run = nullptr;
    } else {
      Work(lock, scratch);
    }
    lock.lock();
  }
}

void Crew::RunAndWait(const std::shared_ptr<WaitedJob>& job) {
  Help(job);
  job->Wait();
}

std::unique_ptr<Scratch> Crew::TakeScratch() {
  std::lock_guard lock(mutex_);
  if (scratches_.empty()) return std::make_unique<Scratch>();
  std::unique_ptr<Scratch> scratch = std::move(scratches_.back());
  scratches_.pop_back();
  return scratch;
}

void Crew::GiveScratch(std::unique_ptr<Scratch> scratch) {
  std::lock_guard lock(mutex_);
  scratches_.push_back(std::move(scratch));
}

}  // namespace jax_ub
