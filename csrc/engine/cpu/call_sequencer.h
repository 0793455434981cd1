// The call sequencer: runs the calls of a group whose ranks are in several processes.
//
// XLA runs independent calls in any order, and in a different order in each process.
// The sequencer runs the calls of a group one after another, in the order in which they
// become complete (all local ranks arrived) in the process of rank 0, the leader. The
// leader appends them to its call log. The other processes take call n from the log,
// wait until their own collective call for it is complete, and run it. The leader's
// order respects the dependencies between calls, which are the same in every process,
// so there is no deadlock.
//
// Identifying calls across processes: a call site has the same name in every process
// (the channel from the lowered module, plus the number of earlier call sites with that
// channel in the compiled program). Its executions are distinguished by the run id and
// by the number of earlier executions on the device in the run. XLA's run id is a hash
// of the program and its devices plus the number of its launches. It is the same in all
// processes, unless one of them loaded the program from a cache that another one
// compiled. In that case the difference between the run ids is learned at the first
// call of the call site and holds for all later calls.
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

// Maps the leader's run ids to this process's run ids, by call site.
class RunIdOffsets {
 public:
  // Returns the collective call that matches the leader's log entry `order`, or nullptr
  // if it is not complete yet. Throws CommunicatorError if the match is ambiguous.
  std::shared_ptr<CollectiveCall> Find(
      const CallLogEntry& order,
      const std::deque<std::shared_ptr<CollectiveCall>>& complete);

  static CallLogEntry LogEntryOf(const CollectiveCall& collective);

 private:
  // Keyed by call site id: this process's run id minus the leader's.
  std::unordered_map<uint64_t, uint32_t> offsets_;
};

class CallSequencer : public std::enable_shared_from_this<CallSequencer> {
 public:
  struct Hooks {
    std::function<Timeouts()> timeouts;
    // A callback after a permanent failure. It must fail the calls of the group that
    // are still pending in the rendezvous.
    std::function<void(const CallSequencer&, const std::exception_ptr& reason)>
        on_failure;
  };

  // `devices` are the group's devices in the order of its ranks. A later communicator
  // of the same devices has a higher generation, which is the same in every process.
  static std::shared_ptr<CallSequencer> Make(
      std::shared_ptr<SharedMemoryCommunicator> communicator,
      std::vector<int64_t> devices,
      int generation,
      ThreadPool& pool,
      Hooks hooks);

  const std::vector<int64_t>& devices() const { return devices_; }
  int generation() const { return generation_; }
  // Returns whether a call was lowered for this communicator. Calls of a program that
  // was lowered for an earlier one are rejected: after a failure, the processes may
  // have launched that program a different number of times. XLA's run ids count
  // launches, so equal run ids could then identify different calls.
  bool MatchesGeneration(const CallAttributes& attributes) const {
    return attributes.generation == 0 || attributes.generation == generation_;
  }
  const std::vector<int>& local_ranks() const { return communicator_->local_ranks(); }
  const SharedMemoryCommunicator& communicator() const { return *communicator_; }

  // Queues a collective call whose local ranks have all arrived. Never blocks.
  // Without memory for the queue, fails the communicator.
  void Enqueue(std::shared_ptr<CollectiveCall> collective) noexcept;

  // Fails all pending and future calls, here and in every other process.
  void Fail(const std::exception_ptr& reason) noexcept;
  // Returns the reason of a permanent failure, or nullptr.
  std::exception_ptr failure() const { return communicator_->poison(); }
  // Returns `reason` as the failure of the call `label`. A message about the
  // communicator ("... died") gets the call's label; a message that already names a
  // call is unchanged.
  std::exception_ptr WithLabel(const std::string& label,
                               const std::exception_ptr& reason) const noexcept;
  // Sends the close message to the peers. Calls in flight fail.
  void Close();

  int64_t num_calls() const;  // number of calls that have begun

 private:
  CallSequencer(std::shared_ptr<SharedMemoryCommunicator> communicator,
                std::vector<int64_t> devices,
                int generation,
                ThreadPool& pool,
                Hooks hooks);

  void RunCalls() noexcept;
  std::shared_ptr<CollectiveCall> NextCall();
  std::shared_ptr<CollectiveCall> WaitForLocalCall(const CallLogEntry& order);
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
  std::string UnmatchedCallMessage(const CallLogEntry& order,
                                   const WaitReason& reason) const;

  const std::shared_ptr<SharedMemoryCommunicator> communicator_;
  const std::vector<int64_t> devices_;
  const int generation_;
  ThreadPool& pool_;
  const Hooks hooks_;

  // The next two members are used only by the thread that executes RunCalls.
  RunIdOffsets run_id_offsets_;
  std::unordered_map<uint64_t, std::string> texts_;  // [signature]: text of the call

  std::atomic<std::thread::id> closing_thread_;

  mutable std::mutex mutex_;  // guards the members below
  std::condition_variable changed_;
  std::deque<std::shared_ptr<CollectiveCall>> complete_;
  bool is_running_ = false;
  int64_t next_call_ = 0;
};

}  // namespace jax_ub
