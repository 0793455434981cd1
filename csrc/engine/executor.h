// Runs a rank's schedule on a transport: the methods that send pieces through slots.
#pragma once

#include <cstdint>
#include <vector>

#include "engine/call.h"
#include "engine/crew.h"
#include "engine/trace.h"
#include "engine/work.h"
#include "schedule/schedule.h"
#include "transport/transport.h"

namespace jax_ub {

// What a call needs of a communicator.
struct SlotPlan {
  Pattern pattern = Pattern::kAllGather;
  int num_splits = 1;
  int num_slots = 0;
  int64_t slot_bytes = 0;
};

// False where nothing is communicated, and for the method direct.
bool UsesSlots(const Attributes& attributes);

// Throws UnsupportedError when the op does not run by that method.
SlotPlan PlanSlots(const Attributes& attributes, const RankCall& call);

// Takes the rank's part in the call, from a thread that may wait. The products of bulk
// ops are left out: they run beside.
void ExecuteRank(const Attributes& attributes,
                 const RankCall& call,
                 const SlotPlan& plan,
                 double timeout_s,
                 Transport& transport,
                 Crew& crew,
                 const TraceContext& trace);

// Work as a job that its rank waits for.
class WorkJob : public WaitedJob {
 public:
  explicit WorkJob(Work work) : work_(std::move(work)) {}
  int64_t num_units() const override { return work_.num_units(); }
  void Run(int64_t unit, Scratch& scratch) override { work_.Run(unit, scratch); }

 private:
  const Work work_;
};

// Returns when the work is done; from a thread that may wait.
void RunWork(Work work, Crew& crew);

}  // namespace jax_ub
