#include "engine/cpu/slot_run.h"

#include <algorithm>
#include <new>
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
  Queue<BlockingTask> tasks;
  for (size_t i = 0; i < num_ranks(); ++i) tasks.Push(NextRankTask());
  pool_.SubmitBlocking(std::move(tasks));
  if (gemms_) gemms_->Participate();
}

void SlotRun::RunAndWait() {
  if (gemms_) gemms_->Start();
  try {
    for (size_t i = 1; i < num_ranks(); ++i) pool_.SubmitBlocking(NextRankTask());
  } catch (const std::bad_alloc&) {
    // Out of memory for the tasks: this thread runs the remaining ranks.
  }
  // At the system's limit of threads, some ranks may not have found a thread. They must
  // fail like the ranks that waited for them.
  while (next_.load() < num_ranks()) RunNextRank();
  std::unique_lock lock(mutex_);
  all_ended_.wait(lock, [&] { return num_left_ == 0; });
  if (failure_) std::rethrow_exception(failure_);
}

std::shared_ptr<BlockingTask> SlotRun::NextRankTask() {
  return std::make_shared<Closure>(
      [self = shared_from_this()] { self->RunNextRank(); });
}

void SlotRun::RunNextRank() noexcept {
  const size_t i = next_.fetch_add(1);
  // The call may have ended, so a late task must not access it.
  if (i >= num_ranks()) return;
  std::exception_ptr failure;
  try {
    RunRank(i);
  } catch (...) {
    failure = std::current_exception();
    if (!has_failed_.exchange(true)) {
      if (failure != hooks_.poison()) {  // otherwise a peer has reported the failure
        const size_t num_begun = std::min(next_.load(), num_ranks());
        failure = AddThreadShortage(failure, static_cast<int>(num_begun),
                                    static_cast<int>(num_ranks()));
      }
      hooks_.fail(failure);
    }
  }
  if (gemms_) {
    try {
      gemms_->Wait();
    } catch (...) {
      failure = std::current_exception();
    }
  }
  bool is_last = false;
  {
    std::lock_guard lock(mutex_);
    if (failure && !failure_) failure_ = failure;
    is_last = --num_left_ == 0;
    if (is_last) all_ended_.notify_all();
  }
  if (hooks_.done) hooks_.done(i, failure, is_last);
}

void SlotRun::RunRank(size_t i) {
  Transport& transport = hooks_.transport(i);
  const TraceContext trace = collective_->trace.OfRank(collective_->RankOf(i));
  CpuDevice device(pool_, trace);
  ExecuteRank(*collective_->attributes, collective_->calls[i], requirements_,
              timeout_s_, transport, device, trace);
}

}  // namespace jax_ub
