// The call sequencer: runs the calls of a group whose ranks are in several processes.
//
// XLA runs independent calls in any order, and in a different order in each process.
// The leader, the process of rank 0, therefore determines one order: the order in which
// its local ranks complete their collective calls. It appends the calls to its call
// log. The other processes take call n from the log, wait until their local ranks have
// submitted that call, and run it. All processes have the same dependencies between
// calls, and the leader's order respects them, so there is no deadlock.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <unordered_map>
#include <vector>

#include "engine/cpu/collective_call.h"
#include "engine/cpu/thread_pool.h"
#include "transport/cpu/shared_memory.h"

namespace jax_ub {

// Converts XLA's run ids in the leader (the process of rank 0) to the run ids of this
// process. The difference between both depends on the call site.
//
// A call site has the same key in every process: the channel from the lowered module,
// plus the number of earlier call sites with that channel in the compiled program. Its
// executions differ by XLA's run id, and by the number of earlier executions on the
// device in the same run. A run id is a hash of the program and its devices, plus the
// number of launches. The hashes of two processes differ if one process compiled the
// program and another one loaded it from the compilation cache. The difference is
// learned at the first call of a call site, and holds for all its later calls.
class RunIdOffsets {
 public:
  // Searches `complete`, the calls that all local ranks have joined, for the call that
  // the leader logged as `entry`. Returns nullptr if the call is not found. Throws
  // CommunicatorError if several calls match.
  std::shared_ptr<CollectiveCall> Find(
      const CallLogEntry& entry,
      const std::deque<std::shared_ptr<CollectiveCall>>& complete);

  static CallLogEntry LogEntryOf(const CollectiveCall& collective);

 private:
  // Run id of this process minus run id of the leader, keyed by
  // CollectiveCall::call_site_id.
  std::unordered_map<uint64_t, uint32_t> offsets_;
};

class CallSequencer : public std::enable_shared_from_this<CallSequencer> {
 public:
  struct Hooks {
    std::function<Timeouts()> timeouts;
    // Called after a permanent failure of the communicator. Must fail the collective
    // calls of the group that still wait for local ranks.
    std::function<void(const CallSequencer&, const std::exception_ptr& reason)>
        on_failure;
  };

  // Creates the sequencer of a communicator. `devices[r]` is the device id of rank r.
  // `generation` is the number of this communicator among all communicators that these
  // devices have had. It is equal in every process.
  static std::shared_ptr<CallSequencer> Make(
      std::shared_ptr<SharedMemoryCommunicator> communicator,
      std::vector<int64_t> devices,
      int generation,
      ThreadPool& pool,
      Hooks hooks);

  const std::vector<int64_t>& devices() const { return devices_; }
  int generation() const { return generation_; }
  // Returns whether the call may use this communicator. A call that was lowered for an
  // earlier communicator of these devices may not use it. When that communicator
  // failed, the processes may have launched the program a different number of times, so
  // equal run ids might identify different calls.
  bool AcceptsGeneration(const CallAttributes& attributes) const {
    return attributes.generation == 0 || attributes.generation >= generation_;
  }
  const std::vector<int>& local_ranks() const { return communicator_->local_ranks(); }
  const SharedMemoryCommunicator& communicator() const { return *communicator_; }

  // Queues a collective call whose local ranks have all arrived. Never blocks. If
  // memory is exhausted, fails the communicator.
  void Enqueue(std::shared_ptr<CollectiveCall> collective) noexcept;

  // Fails all pending and later calls, in this process and in its peers.
  void Fail(const std::exception_ptr& reason) noexcept;
  // Returns the reason of a permanent failure, or nullptr.
  std::exception_ptr failure() const { return communicator_->poison(); }
  // Returns `reason` with the label of a call in its message: the label replaces the
  // name of the communicator at the beginning of the message. Returns `reason` itself
  // if its message does not begin with the name of the communicator.
  std::exception_ptr WithLabel(const std::string& label,
                               const std::exception_ptr& reason) const noexcept;
  // Tells the peers that this process closes the communicator. Fails the calls in
  // flight.
  void Close();

  int64_t num_calls() const;  // number of calls that have begun

  // Returns the mean duration of `count` barriers in seconds. All processes must call
  // this at the same time, while no call runs. Throws std::invalid_argument if `count`
  // is less than 1, and the errors of SharedMemoryCommunicator::Barrier.
  double BarrierSeconds(int count);

 private:
  CallSequencer(std::shared_ptr<SharedMemoryCommunicator> communicator,
                std::vector<int64_t> devices,
                int generation,
                ThreadPool& pool,
                Hooks hooks);

  void RunCalls() noexcept;
  std::shared_ptr<CollectiveCall> NextCall();
  std::shared_ptr<CollectiveCall> WaitForLocalCall(const CallLogEntry& entry);
  std::exception_ptr Run(const std::shared_ptr<const CollectiveCall>& collective,
                         int64_t call);
  void CompareSignatures(const CollectiveCall& collective, int64_t call);
  void RunThroughSlots(const std::shared_ptr<const CollectiveCall>& collective,
                       int64_t call,
                       double timeout_s);
  bool Finish();
  void Complete(const std::shared_ptr<CollectiveCall>& collective,
                std::exception_ptr failure,
                bool inline_last) noexcept;
  void OnPoison(const std::exception_ptr& reason) noexcept;
  std::string TextOf(uint64_t signature, const CollectiveCall& collective);
  WaitReason ReasonFor(const std::string& label, bool is_first_call) const;
  std::string UnmatchedCallMessage(const CallLogEntry& entry,
                                   const WaitReason& reason) const;

  const std::shared_ptr<SharedMemoryCommunicator> communicator_;
  const std::vector<int64_t> devices_;
  const int generation_;
  ThreadPool& pool_;
  const Hooks hooks_;

  // Only the thread that executes RunCalls accesses the two members below.
  RunIdOffsets run_id_offsets_;
  std::unordered_map<uint64_t, std::string> texts_;  // [signature]: text of the call

  std::atomic<std::thread::id> closing_thread_;
  int next_phase_ = 2;  // of BarrierSeconds; a call has at most the barriers 0 and 1

  mutable std::mutex mutex_;  // guards the members below
  std::condition_variable changed_;
  std::deque<std::shared_ptr<CollectiveCall>> complete_;
  bool is_running_ = false;
  int64_t next_call_ = 0;
};

}  // namespace jax_ub
