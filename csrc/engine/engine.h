// Runs calls: matches the ranks, chooses how the method is carried out, tells each rank
// when its results are there.
#pragma once

#include <array>
#include <atomic>
#include <cstdint>
#include <memory>
#include <vector>

#include "engine/call.h"
#include "engine/conductor.h"
#include "engine/crew.h"
#include "engine/gang.h"
#include "engine/slot_pool.h"
#include "engine/trace.h"
#include "engine/work.h"

namespace jax_ub {

struct Counters {
  std::array<int64_t, kNumOps> calls = {};  // of ranks, per op
  int64_t failed_gangs = 0;
  int64_t scratch_bytes = 0;    // memory that threads pack into
  int64_t slot_bytes = 0;       // memory of slots
  int64_t peak_slot_bytes = 0;  // the most there ever was
};

class Engine {
 public:
  Engine(int num_threads, Timeouts timeouts);
  ~Engine() = delete;  // its threads never end

  // Takes a rank's call and returns at once. `done` is called when the results are
  // written and no peer will touch this rank's buffers any more; by this very call, if
  // it is the last of its ranks and small. Throws when the call is refused.
  void Submit(
      CallSite& site, int64_t run_id, int64_t device, RankCall call, Completion done);

  // Carries out the calls of these devices from now on, which are the communicator's
  // ranks. Throws CommunicatorError when they are another one's.
  std::shared_ptr<Conductor> Join(std::shared_ptr<SharedCommunicator> communicator,
                                  std::vector<int64_t> devices,
                                  int generation = 1);
  // Says goodbye; calls that are pending fail.
  void Leave(const std::shared_ptr<Conductor>& conductor);

  // Returns the memory of slots that no call uses.
  void ReleaseSlots() { slots_.ReleaseFree(); }

  Crew& crew() { return *crew_; }
  Board& board() { return *board_; }
  Tracer& tracer() { return tracer_; }
  Counters counters() const;

 private:
  class GangJob;    // a gang as one cooperative computation
  struct SlotCall;  // a gang whose ranks run schedules

  void Execute(std::shared_ptr<Gang> gang, int last_rank, int64_t device);
  void ExecuteDirect(const std::shared_ptr<Gang>& gang, int last_rank);
  void Complete(const Gang& gang, const std::exception_ptr& failure, int here) noexcept;
  void ExecuteSlots(std::shared_ptr<Gang> gang);
  void RunRank(SlotCall& slot_call, int rank) noexcept;
  void Fail(const Gang& gang, const std::exception_ptr& failure) noexcept;
  void BeginTrace(Gang& gang, int64_t device);

  Crew* const crew_;
  Board* const board_;
  SlotPool slots_;
  Tracer tracer_;
  std::array<std::atomic<int64_t>, kNumOps> num_calls_ = {};
  std::atomic<int64_t> num_failed_gangs_{0};
};

}  // namespace jax_ub
