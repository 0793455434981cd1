// The CPU engine. It matches the calls of the ranks, executes them by their method, and
// completes each rank when its results are written.
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
  std::array<int64_t, kNumOps> calls = {};  // rank calls per op
  int64_t failed_calls = 0;
  int64_t scratch_bytes = 0;    // memory into which threads pack GEMM operands
  int64_t slot_bytes = 0;       // memory of all slots
  int64_t peak_slot_bytes = 0;  // maximum of slot_bytes so far
};

class Engine {
 public:
  Engine(int num_threads, Timeouts timeouts);
  ~Engine() = delete;  // its threads never exit

  // Starts a rank's call and returns without waiting for its peers. Invokes `done` when
  // the results are written and no peer accesses this rank's buffers any more. For a
  // small call, the last rank computes the results and invokes `done` before Submit
  // returns. Throws if the call is rejected.
  void Submit(
      CallSite& site, int64_t run_id, int64_t device, RankCall call, Completion done);

  // Creates the call sequencer of a communicator between processes. From then on, the
  // sequencer runs the calls of the group of `devices`, the devices of the
  // communicator's ranks. Throws CommunicatorError if these devices already have a
  // sequencer.
  std::shared_ptr<CallSequencer> Join(
      std::shared_ptr<SharedMemoryCommunicator> communicator,
      std::vector<int64_t> devices,
      int generation = 1);
  // Unregisters the sequencer and closes its communicator. Pending calls fail.
  void Leave(const std::shared_ptr<CallSequencer>& sequencer);

  // Frees the slots (receive buffers) that are kept for later calls and that no call
  // uses.
  void ReleaseSlots() { slots_.ReleaseFree(); }

  ThreadPool& pool() { return *pool_; }
  Rendezvous& rendezvous() { return *rendezvous_; }
  Tracer& tracer() { return tracer_; }
  Counters counters() const;

 private:
  void Execute(std::shared_ptr<CollectiveCall> collective,
               int last_rank,
               int64_t device);
  void ExecuteDirect(const std::shared_ptr<CollectiveCall>& collective, int last_rank);
  void Complete(const CollectiveCall& collective,
                const std::exception_ptr& failure,
                int here) noexcept;
  void ExecuteSlots(const std::shared_ptr<CollectiveCall>& collective);
  void Fail(const CollectiveCall& collective,
            const std::exception_ptr& failure) noexcept;
  void BeginTrace(CollectiveCall& collective, int64_t device) noexcept;

  ThreadPool* const pool_;
  Rendezvous* const rendezvous_;
  SlotPool slots_;
  Tracer tracer_;
  std::array<std::atomic<int64_t>, kNumOps> num_calls_ = {};
  std::atomic<int64_t> num_failed_calls_{0};
};

}  // namespace jax_ub
