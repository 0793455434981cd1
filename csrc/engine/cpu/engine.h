// Runs calls: matches the ranks, chooses how the method is carried out, tells each rank
// when its results are there.
#pragma once

#include <array>
#include <atomic>
#include <cstdint>
#include <memory>
#include <vector>

#include "engine/call.h"
#include "engine/cpu/call_sequencer.h"
#include "engine/cpu/collective_call.h"
#include "engine/cpu/slot_pool.h"
#include "engine/cpu/thread_pool.h"
#include "engine/cpu/work_list.h"
#include "engine/trace.h"

namespace jax_ub {

struct Counters {
  std::array<int64_t, kNumOps> calls = {};  // of ranks, per op
  int64_t failed_calls = 0;
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
  std::shared_ptr<CallSequencer> Join(
      std::shared_ptr<SharedMemoryCommunicator> communicator,
      std::vector<int64_t> devices,
      int generation = 1);
  // Says goodbye; calls that are pending fail.
  void Leave(const std::shared_ptr<CallSequencer>& sequencer);

  // Returns the memory of slots that no call uses.
  void ReleaseSlots() { slots_.ReleaseFree(); }

  ThreadPool& pool() { return *pool_; }
  Rendezvous& rendezvous() { return *rendezvous_; }
  Tracer& tracer() { return tracer_; }
  Counters counters() const;

 private:
  class CollectiveJob;  // a collective call as one cooperative computation
  struct SlotRun;       // a collective call whose ranks run schedules

  void Execute(std::shared_ptr<CollectiveCall> collective,
               int last_rank,
               int64_t device);
  void ExecuteDirect(const std::shared_ptr<CollectiveCall>& collective, int last_rank);
  void Complete(const CollectiveCall& collective,
                const std::exception_ptr& failure,
                int here) noexcept;
  void ExecuteSlots(std::shared_ptr<CollectiveCall> collective);
  void RunRank(SlotRun& slot_run, int rank) noexcept;
  void Fail(const CollectiveCall& collective,
            const std::exception_ptr& failure) noexcept;
  void BeginTrace(CollectiveCall& collective, int64_t device);

  ThreadPool* const pool_;
  Rendezvous* const rendezvous_;
  SlotPool slots_;
  Tracer tracer_;
  std::array<std::atomic<int64_t>, kNumOps> num_calls_ = {};
  std::atomic<int64_t> num_failed_calls_{0};
};

}  // namespace jax_ub
