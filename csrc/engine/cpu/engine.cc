#include "engine/cpu/engine.h"

#include <new>
#include <utility>

#include "engine/communicated_tensors.h"
#include "engine/cpu/cpu_device.h"
#include "engine/cpu/direct_planner.h"
#include "engine/cpu/slot_run.h"
#include "engine/executor.h"
#include "platform/error.h"

namespace jax_ub {

Engine::Engine(int num_threads, Timeouts timeouts)
    : pool_(new ThreadPool(num_threads)),
      rendezvous_(new Rendezvous(
          [pool = pool_](std::shared_ptr<BlockingTask> run) {
            pool->SubmitBlocking(std::move(run));
          },
          timeouts)) {}

void Engine::Submit(
    CallSite& site, int64_t run_id, int64_t device, RankCall call, Completion done) {
  const CallAttributes& at = site.attributes();
  ++num_calls_[static_cast<size_t>(at.op)];
  call.submitted_ns = TraceNow(&tracer_);
  if (site.is_local()) {
    CheckCall(at, call);
    auto collective = std::make_shared<CollectiveCall>();
    collective->attributes = &at;
    collective->run_id = run_id;
    collective->calls.push_back(std::move(call));
    collective->completions.push_back(std::move(done));
    return Execute(std::move(collective), 0, device);
  }
  std::shared_ptr<CollectiveCall> collective;
  int rank = 0;
  try {
    CheckCall(at, call);
    collective = rendezvous_->Join(site, run_id, device, std::move(call),
                                   std::move(done), &rank);
  } catch (...) {
    ++num_failed_calls_;
    rendezvous_->PoisonGroupOf(site, run_id, device, std::current_exception());
    throw;
  }
  if (!collective) return;
  // From here on, an error must fail all ranks through their completions. An exception
  // would reach only the rank that arrived last.
  if (const std::shared_ptr<CallSequencer> sequencer = collective->sequencer) {
    BeginTrace(*collective, device);
    return sequencer->Enqueue(std::move(collective));
  }
  Execute(std::move(collective), rank, device);
}

std::shared_ptr<CallSequencer> Engine::Join(
    std::shared_ptr<SharedMemoryCommunicator> communicator,
    std::vector<int64_t> devices,
    int generation) {
  // The hooks may capture `this`, because the engine is never destroyed.
  auto sequencer = CallSequencer::Make(
      std::move(communicator), std::move(devices), generation, *pool_,
      {[this] { return rendezvous_->timeouts(); },
       [this](const CallSequencer& failed, const std::exception_ptr& reason) {
         ++num_failed_calls_;
         rendezvous_->FailCallsOf(failed, reason);
       }});
  rendezvous_->Attach(sequencer);
  return sequencer;
}

void Engine::Leave(const std::shared_ptr<CallSequencer>& sequencer) {
  rendezvous_->Detach(*sequencer);
  sequencer->Close();
}

// Registers the call with the tracer, if tracing is enabled. If memory is exhausted,
// the call is not traced. An exception here would leave the ranks waiting for their
// completion. `device` is used only for local calls.
void Engine::BeginTrace(CollectiveCall& collective, int64_t device) noexcept try {
  if (!tracer_.enabled()) return;
  const CallAttributes& at = *collective.attributes;
  TraceCall call{at.label, at.op, at.method, at.variant, at.num_ranks, 0, {device}, ""};
  call.num_splits = static_cast<int>(at.num_splits);
  if (!at.ranks.empty()) {
    const auto first = at.ranks.begin() + collective.group * at.num_ranks;
    call.devices.assign(first, first + at.num_ranks);
  }
  for (const Tensor& operand : collective.calls[0].operands) {
    if (!call.operands.empty()) call.operands += ' ';
    call.operands += Describe(operand);
  }
  collective.trace = tracer_.BeginCall(std::move(call));
  for (size_t i = 0; i < collective.calls.size(); ++i) {
    collective.trace.OfRank(collective.RankOf(i))
        .Since(collective.calls[i].submitted_ns, TraceKind::kGather);
  }
} catch (const std::bad_alloc&) {
  tracer_.DropCall();
}

void Engine::Execute(std::shared_ptr<CollectiveCall> collective,
                     int last_rank,
                     int64_t device) {
  BeginTrace(*collective, device);
  try {
    CheckEqualShapes(*collective);
    if (UsesSlots(*collective->attributes)) {
      ExecuteSlots(collective);
    } else {
      ExecuteDirect(collective, last_rank);
    }
  } catch (...) {
    // All ranks can complete with an error, because no other thread accesses the
    // buffers at this point.
    Complete(*collective, std::current_exception(), last_rank);
  }
}

// Completes all ranks with `failure` or nullptr. Each rank needs its own thread,
// because completing a rank continues its program, which may wait for another rank. The
// rank with index `here` uses the current thread.
void Engine::Complete(const CollectiveCall& collective,
                      const std::exception_ptr& failure,
                      int here) noexcept {
  if (failure) Fail(collective, failure);
  Queue<BlockingTask> runs;
  for (size_t r = 0; r < collective.completions.size(); ++r) {
    collective.trace.OfRank(static_cast<int>(r))
        .Since(collective.calls[r].submitted_ns, TraceKind::kCall);
    if (static_cast<int>(r) != here)
      runs.Push(collective.completions[r].AsTask(failure));
  }
  if (!runs.empty()) pool_->SubmitBlocking(std::move(runs));
  if (here != kNone) collective.completions[here](failure);
}

void Engine::Fail(const CollectiveCall& collective,
                  const std::exception_ptr& failure) noexcept {
  ++num_failed_calls_;
  if (!collective.attributes->ranks.empty()) {
    rendezvous_->Poison(collective.run_id, collective.group_key, failure);
  }
}

void Engine::ExecuteDirect(const std::shared_ptr<CollectiveCall>& collective,
                           int last_rank) {
  WorkList work = PlanDirect(*collective->attributes,
                             {collective->calls, collective->calls}, pool_->workers());
  work.set_trace(collective->trace, {});
  if (work.estimated_us() < kMaxInlineUs) {
    RunWork(work, *pool_);
    return Complete(*collective, nullptr, last_rank);
  }
  pool_->Participate(MakeJob(
      std::move(work), [this, collective, last_rank](const std::exception_ptr& failure,
                                                     bool participated) {
        // If `participated` is true, this thread is still in the FFI handler of the
        // rank that arrived last, so that rank completes without a callback.
        Complete(*collective, failure, participated ? last_rank : kNone);
      }));
}

// Executes a call whose ranks send data through slots (receive buffers). Each rank
// completes independently, because its peers access only its slots, never its operands
// or results.
void Engine::ExecuteSlots(const std::shared_ptr<CollectiveCall>& collective) {
  const SlotRequirements requirements = SlotRequirementsOf(*collective, *pool_);
  const auto communicator = std::make_shared<SlotPool::PooledCommunicator>(
      slots_.Acquire(collective->attributes->num_ranks, requirements.num_slots,
                     requirements.slot_bytes));
  const auto complete = [this, collective, communicator](
                            size_t i, const std::exception_ptr& failure, bool is_last) {
    const int rank = static_cast<int>(i);
    collective->trace.OfRank(rank).Since(collective->calls[i].submitted_ns,
                                         TraceKind::kCall);
    if (is_last) {
      if ((*communicator)->poison()) {
        communicator->reset();
      } else {
        slots_.Release(std::move(*communicator));
      }
    }
    const Completion done = collective->completions[i];
    done(failure);
  };
  std::make_shared<SlotRun>(
      collective, requirements, rendezvous_->timeout_s(), *pool_,
      SlotRun::Hooks{
          .transport = [communicator](size_t i) -> Transport& {
            return (*communicator)->rank(static_cast<int>(i));
          },
          .poison = [communicator] { return (*communicator)->poison(); },
          .fail =
              [this, collective, communicator](const std::exception_ptr& reason) {
                (*communicator)->Poison(reason);
                Fail(*collective, reason);
              },
          .done = complete})
      ->Start();
}

Counters Engine::counters() const {
  Counters counters;
  for (int op = 0; op < kNumOps; ++op) counters.calls[op] = num_calls_[op].load();
  counters.failed_calls = num_failed_calls_.load();
  counters.scratch_bytes = pool_->scratch_bytes();
  counters.slot_bytes = slots_.size_bytes();
  counters.peak_slot_bytes = slots_.peak_bytes();
  return counters;
}

}  // namespace jax_ub
