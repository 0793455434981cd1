#include "engine/engine.h"

#include <utility>

#include "engine/crew_device.h"
#include "engine/direct.h"
#include "engine/exchange.h"
#include "engine/executor.h"
#include "platform/error.h"

namespace jax_ub {

// One gang as a job: its units, and afterwards the completion of every rank.
class Engine::GangJob : public Job {
 public:
  GangJob(Engine& engine, Work work, std::shared_ptr<Gang> gang, int last_rank)
      : Job(work.estimated_us()),
        engine_(engine),
        work_(std::move(work)),
        gang_(std::move(gang)),
        last_rank_(last_rank) {}

  int64_t num_units() const override { return work_.num_units(); }
  void Run(int64_t unit, Scratch& scratch) override { work_.Run(unit, scratch); }
  double estimated_us() const { return work_.estimated_us(); }

  // The helper is the last rank's thread.
  void Done(std::exception_ptr failure, bool helped) noexcept override {
    engine_.Complete(*gang_, failure, helped ? last_rank_ : kNone);
  }

 private:
  Engine& engine_;
  const Work work_;
  const std::shared_ptr<Gang> gang_;
  const int last_rank_;
};

Engine::Engine(int num_threads, Timeouts timeouts)
    : crew_(new Crew(num_threads)),
      board_(new Board(
          [crew = crew_](std::shared_ptr<Run> run) { crew->Start(std::move(run)); },
          timeouts)) {}

void Engine::Submit(
    CallSite& site, int64_t run_id, int64_t device, RankCall call, Completion done) {
  const Attributes& at = site.attributes();
  ++num_calls_[static_cast<size_t>(at.op)];
  call.submitted_ns = TraceNow(&tracer_);
  if (site.is_local()) {
    CheckCall(at, call);
    auto gang = std::make_shared<Gang>();
    gang->attributes = &at;
    gang->run_id = run_id;
    gang->calls.push_back(std::move(call));
    gang->completions.push_back(std::move(done));
    return Execute(std::move(gang), 0, device);
  }
  std::shared_ptr<Gang> gang;
  int rank = 0;
  try {
    CheckCall(at, call);
    gang =
        board_->Arrive(site, run_id, device, std::move(call), std::move(done), &rank);
  } catch (...) {
    ++num_failed_gangs_;
    board_->PoisonGroupOf(site, run_id, device, std::current_exception());
    throw;
  }
  if (!gang) return;
  if (const std::shared_ptr<Conductor> conductor = gang->conductor) {
    BeginTrace(*gang, device);
    return conductor->Take(std::move(gang));
  }
  Execute(std::move(gang), rank, device);
}

std::shared_ptr<Conductor> Engine::Join(
    std::shared_ptr<SharedCommunicator> communicator,
    std::vector<int64_t> devices,
    int generation) {
  // The hooks outlive no engine: engines never end.
  auto conductor = Conductor::Make(
      std::move(communicator), std::move(devices), generation, *crew_,
      {[this] { return board_->timeouts(); },
       [this](const Conductor& failed, const std::exception_ptr& reason) {
         ++num_failed_gangs_;
         board_->FailAllOf(failed, reason);
       }});
  board_->Join(conductor);
  return conductor;
}

void Engine::Leave(const std::shared_ptr<Conductor>& conductor) {
  board_->Leave(*conductor);
  conductor->Close();
}

// `device` is that of a local call.
void Engine::BeginTrace(Gang& gang, int64_t device) {
  if (!tracer_.enabled()) return;
  const Attributes& at = *gang.attributes;
  TraceCall call{at.label, at.op, at.method, at.variant, at.num_ranks, 0, {device}, ""};
  call.num_splits = static_cast<int>(at.num_splits);
  if (!at.ranks.empty()) {
    const auto first = at.ranks.begin() + gang.group * at.num_ranks;
    call.devices.assign(first, first + at.num_ranks);
  }
  for (const Tensor& operand : gang.calls[0].operands) {
    if (!call.operands.empty()) call.operands += ' ';
    call.operands += Describe(operand);
  }
  gang.trace = tracer_.BeginCall(std::move(call));
  for (size_t i = 0; i < gang.calls.size(); ++i) {
    gang.trace.OfRank(gang.RankOf(i))
        .Since(gang.calls[i].submitted_ns, TraceKind::kGather);
  }
}

void Engine::Execute(std::shared_ptr<Gang> gang, int last_rank, int64_t device) {
  try {
    BeginTrace(*gang, device);
    CheckAgreement(*gang);
    if (UsesSlots(*gang->attributes)) {
      ExecuteSlots(gang);
    } else {
      ExecuteDirect(gang, last_rank);
    }
  } catch (...) {
    // Before anything was begun: nobody touches the buffers.
    Complete(*gang, std::current_exception(), last_rank);
  }
}

// Completing a rank runs the rest of its program, which may wait for another rank: each
// is completed from a thread of its own, but for `here`, which is this thread's.
void Engine::Complete(const Gang& gang,
                      const std::exception_ptr& failure,
                      int here) noexcept {
  if (failure) Fail(gang, failure);
  Queue<Run> runs;
  for (size_t r = 0; r < gang.completions.size(); ++r) {
    gang.trace.OfRank(static_cast<int>(r))
        .Since(gang.calls[r].submitted_ns, TraceKind::kCall);
    if (static_cast<int>(r) != here) runs.Push(gang.completions[r].AsRun(failure));
  }
  if (!runs.empty()) crew_->Start(std::move(runs));
  if (here != kNone) gang.completions[here](failure);
}

void Engine::Fail(const Gang& gang, const std::exception_ptr& failure) noexcept {
  ++num_failed_gangs_;
  if (!gang.attributes->ranks.empty()) {
    board_->Poison(gang.run_id, gang.group_key, failure);
  }
}

void Engine::ExecuteDirect(const std::shared_ptr<Gang>& gang, int last_rank) {
  Work work =
      PlanDirect(*gang->attributes, {gang->calls, gang->calls}, crew_->workers());
  work.set_trace(gang->trace, {});
  const auto job = std::make_shared<GangJob>(*this, std::move(work), gang, last_rank);
  if (job->estimated_us() < kInlineUs) {  // here, in the last rank to arrive
    crew_->RunInline(*job);
  } else {
    crew_->Help(job);
  }
}

struct Engine::SlotCall {
  SlotCall(std::shared_ptr<Gang> whose,
           const SlotPlan& what,
           SlotPool::Pooled where,
           double how_long_s)
      : gang(std::move(whose)),
        plan(what),
        timeout_s(how_long_s),
        communicator(std::move(where)),
        num_running(gang->attributes->num_ranks) {}

  const std::shared_ptr<Gang> gang;
  const SlotPlan plan;
  const double timeout_s;
  SlotPool::Pooled communicator;
  std::shared_ptr<WorkJob> products;  // of a bulk op, beside the schedule
  std::atomic<int> num_begun{0};
  std::atomic<int> num_running;
  std::atomic<bool> failed{false};
};

void Engine::ExecuteSlots(std::shared_ptr<Gang> gang) {
  const Attributes& at = *gang->attributes;
  const SlotPlan plan = gang->slot_plans->Find(at, gang->calls[0], CrewDevice(*crew_));
  auto slot_call = std::make_shared<SlotCall>(
      gang, plan, slots_.Acquire(at.num_ranks, plan.num_slots, plan.slot_bytes),
      board_->timeout_s());
  if (IsBulk(at.op)) {
    Work work = PlanProducts(at, gang->calls, crew_->workers());
    work.set_trace(gang->trace, {});
    slot_call->products = std::make_shared<WorkJob>(std::move(work));
  }
  Queue<Run> runs;  // all of them, or none
  for (int rank = 0; rank < at.num_ranks; ++rank) {
    runs.Push(std::make_shared<Closure>(
        [this, slot_call, rank] { RunRank(*slot_call, rank); }));
  }
  crew_->Start(std::move(runs));
  if (slot_call->products) crew_->Help(slot_call->products);
}

// Peers touch a rank's slots only, never its buffers: each rank is done for itself.
void Engine::RunRank(SlotCall& slot_call, int rank) noexcept {
  const Gang& gang = *slot_call.gang;
  ++slot_call.num_begun;
  std::exception_ptr failure;
  try {
    const TraceContext trace = gang.trace.OfRank(rank);
    CrewDevice device(*crew_, trace);
    ExecuteRank(*gang.attributes, gang.calls[rank], slot_call.plan, slot_call.timeout_s,
                slot_call.communicator->rank(rank), device, trace);
  } catch (...) {
    failure = std::current_exception();
    if (!slot_call.failed.exchange(true)) {
      failure = WithShortage(failure, slot_call.num_begun, gang.attributes->num_ranks);
      slot_call.communicator->Poison(failure);
      Fail(gang, failure);
    }
  }
  if (slot_call.products) {
    try {
      slot_call.products->Wait();
    } catch (...) {
      failure = std::current_exception();
    }
  }
  gang.trace.OfRank(rank).Since(gang.calls[rank].submitted_ns, TraceKind::kCall);
  const Completion done = gang.completions[rank];
  if (slot_call.num_running.fetch_sub(1) == 1) {
    if (slot_call.failed) {
      slot_call.communicator.reset();
    } else {
      slots_.Give(std::move(slot_call.communicator));
    }
  }
  done(failure);
}

Counters Engine::counters() const {
  Counters counters;
  for (int op = 0; op < kNumOps; ++op) counters.calls[op] = num_calls_[op].load();
  counters.failed_gangs = num_failed_gangs_.load();
  counters.scratch_bytes = crew_->scratch_bytes();
  counters.slot_bytes = slots_.size_bytes();
  counters.peak_slot_bytes = slots_.peak_bytes();
  return counters;
}

}  // namespace jax_ub
