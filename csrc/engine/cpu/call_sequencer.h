// Calls of a group whose ranks lie in several processes.
//
// XLA runs independent calls in any order, another one in each process. So calls run one
// after another, in the order in which they become complete (all local ranks arrived) in
// the process of rank 0, the leader: it writes them into its order log; the others take
// call n from the log, wait until their own collective call of that call is complete, and run it.
// The leader's order respects how calls depend on each other, which is the same
// everywhere, so nobody waits in a circle.
//
// Which collective call is which: a call site has the same name in every process ("channel", from
// the lowered module, and how many sites of the compiled program have that channel); its
// executions are told apart by the run id and by how often the device was here in the
// run. XLA's run id is a hash of the program and its devices plus the number of its
// launches: the same in all processes, except where one loaded the program from a cache
// that another compiled. Then the distance between both is learned at the first call of
// the site, and holds for all later ones.
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

// The collective call of a call, among those that are complete here.
class RunIdOffsets {
 public:
  // The collective call that the leader's order means; nullptr: not here yet. Throws
  // CommunicatorError where it cannot be told which one is meant.
  std::shared_ptr<CollectiveCall> Find(
      const CallLogEntry& order,
      const std::deque<std::shared_ptr<CollectiveCall>>& complete);

  static CallLogEntry LogEntryOf(const CollectiveCall& collective);

 private:
  // Call site -> the own run id minus the leader's.
  std::unordered_map<uint64_t, uint32_t> offsets_;
};

class CallSequencer : public std::enable_shared_from_this<CallSequencer> {
 public:
  struct Hooks {
    std::function<Timeouts()> timeouts;
    // Something failed for good: whatever of this group waits elsewhere fails too.
    std::function<void(const CallSequencer&, const std::exception_ptr& reason)>
        on_failure;
  };

  // `devices` of the group, in the order of its ranks. A later communicator of the same
  // devices has a higher generation, the same in every process.
  static std::shared_ptr<CallSequencer> Make(
      std::shared_ptr<SharedMemoryCommunicator> communicator,
      std::vector<int64_t> devices,
      int generation,
      ThreadPool& pool,
      Hooks hooks);

  const std::vector<int64_t>& devices() const { return devices_; }
  int generation() const { return generation_; }
  // Whether a call was lowered for this communicator. XLA numbers the launches of a
  // program for as long as the process lives, and where one failed, the processes may have
  // launched it unequally often: with an earlier one's numbers they would pair different
  // calls.
  bool MatchesGeneration(const CallAttributes& attributes) const {
    return attributes.generation == 0 || attributes.generation == generation_;
  }
  const std::vector<int>& local_ranks() const { return communicator_->local_ranks(); }
  const SharedMemoryCommunicator& communicator() const { return *communicator_; }

  // A collective call whose local ranks have all arrived. Never waits.
  void Enqueue(std::shared_ptr<CollectiveCall> collective);

  // Fails what is pending here and in every other process, and whatever comes.
  void Fail(const std::exception_ptr& reason) noexcept;
  // Why there are no more calls, or nullptr.
  std::exception_ptr failure() const;
  // A reason as the failure of a call: what is said of the communicator itself ("...
  // died") is said of the call; what names a call already stays.
  std::exception_ptr WithLabel(const std::string& label,
                               const std::exception_ptr& reason) const noexcept;
  // Says goodbye to the peers. Safe with calls in flight: they fail.
  void Close();

  int64_t num_calls() const;  // that were begun

 private:
  CallSequencer(std::shared_ptr<SharedMemoryCommunicator> communicator,
                std::vector<int64_t> devices,
                int generation,
                ThreadPool& pool,
                Hooks hooks);

  void RunCalls() noexcept;
  std::shared_ptr<CollectiveCall> NextCall();
  std::shared_ptr<CollectiveCall> WaitForLocalCall(const CallLogEntry& order);
  std::exception_ptr Run(const CollectiveCall& collective, int64_t call);
  void CompareSignatures(const CollectiveCall& collective, int64_t call);
  void RunThroughSlots(const CollectiveCall& collective,
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

  // Of the thread that conducts.
  RunIdOffsets run_id_offsets_;
  std::unordered_map<uint64_t, std::string> texts_;  // by signature

  std::atomic<std::thread::id> closing_thread_;

  mutable std::mutex mutex_;  // guards all below
  std::condition_variable changed_;
  std::deque<std::shared_ptr<CollectiveCall>> complete_;
  bool is_running_ = false;
  int64_t next_call_ = 0;
  std::exception_ptr failure_;
};

}  // namespace jax_ub
