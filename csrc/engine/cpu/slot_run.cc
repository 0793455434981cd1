#include "engine/cpu/slot_run.h"

#include <algorithm>
#include <utility>

#include "engine/cpu/cpu_device.h"
#include "engine/cpu/direct_planner.h"
#include "engine/executor.h"

namespace jax_ub {

SlotRequirements SlotRequirementsOf(const CollectiveCall& collective,
                                    ThreadPool& pool) {
  return collective.slot_plans->Find(*collective.attributes, collective.calls[0],
                                     CpuDevice(pool));
}

SlotRun::SlotRun(std::shared_ptr<const CollectiveCall> collective,
                 const SlotRequirements& requirements,
                 double timeout_s,
                 ThreadPool& pool,
                 Hooks hooks)
    : collective_(std::move(collective)),
      requirements_(requirements),
      timeout_s_(timeout_s),
      pool_(pool),
      hooks_(std::move(hooks)),
      num_left_(num_ranks()) {
  const CallAttributes& at = *collective_->attributes;
  if (!InfoOf(at.op).is_bulk()) return;
  WorkList work = PlanProducts(at, collective_->calls, pool_.workers());
  work.set_trace(collective_->trace, {});
  gemms_.emplace(std::move(work), pool_);
}

void SlotRun::Start() {
  pool_.SubmitBlocking(MakeTasks(num_ranks()));
  if (gemms_) gemms_->Participate();
}

void SlotRun::RunAndWait() {
  Queue<BlockingTask> tasks = MakeTasks(num_ranks() - 1);
  if (gemms_) gemms_->Start();
  // Before this line, an exception is harmless, because no rank has begun. After it,
  // nothing may throw until all ranks have ended, because the ranks use objects of the
  // caller.
  pool_.SubmitBlocking(std::move(tasks));
  // The current thread also runs ranks. If the system limits the number of threads,
  // some ranks may still have no thread. By the time that the current thread runs such
  // a rank, its peers have failed, so the rank fails as well.
  while (next_.load() < num_ranks()) RunNextRank();
  std::unique_lock lock(mutex_);
  all_ended_.wait(lock, [&] { return num_left_ == 0; });
  if (failure_) std::rethrow_exception(failure_);
}

// Allocates the tasks of all ranks before any rank begins. If the allocation of a task
// failed later, the ranks that had begun would wait for a rank without a task.
Queue<BlockingTask> SlotRun::MakeTasks(size_t num_tasks) {
  Queue<BlockingTask> tasks;
  for (size_t i = 0; i < num_tasks; ++i) {
    tasks.Push(std::make_shared<Closure>(
        [self = shared_from_this()] { self->RunNextRank(); }));
  }
  return tasks;
}

void SlotRun::RunNextRank() noexcept {
  const size_t i = next_.fetch_add(1);
  if (i >= num_ranks()) return;
  std::exception_ptr failure = Try([&] { RunRank(i); });
  if (gemms_) {
    const std::exception_ptr gemm_failure = Try([&] { gemms_->Wait(); });
    if (!failure) failure = gemm_failure;
  }
  bool is_last = false;
  {
    std::lock_guard lock(mutex_);
    if (failure && !failure_) failure_ = failure;
    is_last = --num_left_ == 0;
  }
  if (is_last) all_ended_.notify_all();
  if (hooks_.done) hooks_.done(i, failure, is_last);
}

// Runs `body`, a part of a rank's call. Returns the exception of `body`, or nullptr.
// Only the first exception of all ranks is passed to hooks_.fail.
template <typename Body>
std::exception_ptr SlotRun::Try(const Body& body) noexcept {
  try {
    body();
    return nullptr;
  } catch (...) {
    std::exception_ptr failure = std::current_exception();
    if (!has_failed_.exchange(true)) Report(failure);
    return failure;
  }
}

void SlotRun::Report(std::exception_ptr& failure) noexcept {
  if (failure != hooks_.poison()) {  // otherwise a peer has reported the failure
    const size_t num_begun = std::min(next_.load(), num_ranks());
    failure = AddThreadShortage(failure, static_cast<int>(num_begun),
                                static_cast<int>(num_ranks()));
  }
  hooks_.fail(failure);
}

void SlotRun::RunRank(size_t i) {
  Transport& transport = hooks_.transport(i);
  const TraceContext trace = collective_->trace.OfRank(collective_->RankOf(i));
  CpuDevice device(pool_, trace);
  ExecuteRank(*collective_->attributes, collective_->calls[i], requirements_,
              timeout_s_, transport, device, trace);
}

}  // namespace jax_ub
