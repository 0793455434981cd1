#include "engine/engine.h"

#include <utility>

#include "engine/direct.h"
#include "platform/error.h"

namespace jax_ub {

namespace {

// Work below this is done by the last rank to arrive: waking a thread costs about as
// much.
constexpr double kInlineUs = 50;

// One gang as a job: its units, and afterwards the completion of every rank.
class GangJob : public Job {
 public:
  GangJob(Work work,
          std::vector<Completion> completions,
          size_t last_rank,
          Crew& crew,
          std::function<void(const std::exception_ptr&)> on_failure)
      : work_(std::move(work)),
        completions_(std::move(completions)),
        last_rank_(last_rank),
        crew_(crew),
        on_failure_(std::move(on_failure)) {}

  int64_t num_units() const override { return work_.num_units(); }
  void Run(int64_t unit, Scratch& scratch) override { work_.Run(unit, scratch); }
  double estimated_us() const { return work_.estimated_us(); }

  // Completing a rank runs the rest of its program, which may wait for another rank:
  // each is completed from a thread of its own. The helper is the last rank's thread.
  void Done(std::exception_ptr failure, bool helped) override {
    if (failure) on_failure_(failure);
    for (size_t r = 0; r < completions_.size(); ++r) {
      if (helped && r == last_rank_) continue;
      crew_.Start([done = std::move(completions_[r]), failure] { done(failure); });
    }
    if (helped) completions_[last_rank_](failure);
  }

 private:
  const Work work_;
  std::vector<Completion> completions_;
  const size_t last_rank_;
  Crew& crew_;
  const std::function<void(const std::exception_ptr&)> on_failure_;
};

}  // namespace

Engine::Engine(int num_threads, double timeout_s)
    : crew_(new Crew(num_threads)),
      board_(new Board(
          [crew = crew_](std::function<void()> run) { crew->Start(std::move(run)); },
          timeout_s)) {}

void Engine::Submit(
    CallSite& site, int64_t run_id, int64_t device, RankCall call, Completion done) {
  const Attributes& at = site.attributes();
  ++num_calls_[static_cast<size_t>(at.op)];
  if (site.is_local()) {
    CheckCall(at, call);
    auto gang = std::make_shared<Gang>();
    gang->attributes = &at;
    gang->run_id = run_id;
    gang->calls.push_back(std::move(call));
    gang->completions.push_back(std::move(done));
    return Execute(std::move(gang), 0);
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
  if (gang) Execute(std::move(gang), rank);
}

void Engine::Execute(std::shared_ptr<Gang> gang, int last_rank) {
  const Attributes& at = *gang->attributes;
  const auto fail = [this, run_id = gang->run_id, key = gang->group_key,
                     local = at.ranks.empty()](const std::exception_ptr& failure) {
    ++num_failed_gangs_;
    if (!local) board_->Poison(run_id, key, failure);
  };
  std::exception_ptr failure;
  std::shared_ptr<GangJob> job;
  try {
    CheckAgreement(*gang);
    job = std::make_shared<GangJob>(PlanDirect(at, gang->calls, crew_->num_threads()),
                                    gang->completions, last_rank, *crew_, fail);
  } catch (...) {
    failure = std::current_exception();
  }
  if (failure) {
    job = std::make_shared<GangJob>(Work(), gang->completions, last_rank, *crew_, fail);
    job->Done(failure, true);
  } else if (job->estimated_us() < kInlineUs) {
    crew_->RunInline(*job);
  } else {
    crew_->Help(std::move(job));
  }
}

Counters Engine::counters() const {
  Counters counters;
  for (int op = 0; op < kNumOps; ++op) counters.calls[op] = num_calls_[op].load();
  counters.failed_gangs = num_failed_gangs_.load();
  counters.scratch_bytes = crew_->scratch_bytes();
  return counters;
}

}  // namespace jax_ub
