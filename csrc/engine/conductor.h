// Calls of a group whose ranks lie in several processes.
//
// XLA runs independent calls in any order, another one in each process. So calls run one
// after another, in the order in which they become complete (all local ranks arrived) in
// the process of rank 0, the leader: it writes them into its order log; the others take
// call n from the log, wait until their own gang of that call is complete, and run it.
// The leader's order respects how calls depend on each other, which is the same
// everywhere, so nobody waits in a circle.
//
// Which gang is which: a call site has the same name in every process ("channel", from
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

#include "engine/crew.h"
#include "engine/gang.h"
#include "transport/cpu/shared_memory.h"

namespace jax_ub {

// The gang of a call, among those that are complete here.
class Alignment {
 public:
  // The gang that the leader's order means; nullptr: not here yet. Throws
  // CommunicatorError where it cannot be told which one is meant.
  std::shared_ptr<Gang> Find(const Order& order,
                             const std::deque<std::shared_ptr<Gang>>& complete);

  static Order OrderOf(const Gang& gang);

 private:
  // Call site -> the own run id minus the leader's.
  std::unordered_map<uint64_t, uint32_t> distances_;
};

class Conductor : public std::enable_shared_from_this<Conductor> {
 public:
  struct Hooks {
    std::function<Timeouts()> timeouts;
    // Something failed for good: whatever of this group waits elsewhere fails too.
    std::function<void(const Conductor&, const std::exception_ptr& reason)> on_failure;
  };

  // `devices` of the group, in the order of its ranks. A later communicator of the same
  // devices has a higher generation, the same in every process.
  static std::shared_ptr<Conductor> Make(
      std::shared_ptr<SharedCommunicator> communicator,
      std::vector<int64_t> devices,
      int generation,
      Crew& crew,
      Hooks hooks);

  const std::vector<int64_t>& devices() const { return devices_; }
  int generation() const { return generation_; }
  // Whether a call was lowered for this communicator. XLA numbers the launches of a
  // program for as long as the process lives, and where one failed, the processes may have
  // launched it unequally often: with an earlier one's numbers they would pair different
  // calls.
  bool Serves(const Attributes& attributes) const {
    return attributes.generation == 0 || attributes.generation == generation_;
  }
  const std::vector<int>& local_ranks() const { return communicator_->local_ranks(); }
  const SharedCommunicator& communicator() const { return *communicator_; }

  // A gang whose local ranks have all arrived. Never waits.
  void Take(std::shared_ptr<Gang> gang);

  // Fails what is pending here and in every other process, and whatever comes.
  void Fail(const std::exception_ptr& reason) noexcept;
  // Why there are no more calls, or nullptr.
  std::exception_ptr failure() const;
  // A reason as the failure of a call: what is said of the communicator itself ("...
  // died") is said of the call; what names a call already stays.
  std::exception_ptr FailureOf(const std::string& label,
                               const std::exception_ptr& reason) const noexcept;
  // Says goodbye to the peers. Safe with calls in flight: they fail.
  void Close();

  int64_t num_calls() const;  // that were begun

 private:
  Conductor(std::shared_ptr<SharedCommunicator> communicator,
            std::vector<int64_t> devices,
            int generation,
            Crew& crew,
            Hooks hooks);

  void Conduct() noexcept;
  std::shared_ptr<Gang> NextGang();
  std::shared_ptr<Gang> AwaitGang(const Order& order);
  std::exception_ptr Run(const Gang& gang, int64_t call);
  void Meet(const Gang& gang, int64_t call);
  void RunSlots(const Gang& gang, int64_t call, double timeout_s);
  bool Finish();
  void Complete(const std::shared_ptr<Gang>& gang,
                std::exception_ptr failure,
                bool inline_last) noexcept;
  void OnPoison(const std::exception_ptr& reason) noexcept;
  std::string TextOf(uint64_t signature, const Gang& gang);
  WaitReason ReasonFor(const std::string& label, bool is_first_call) const;
  std::string Unknown(const Order& order, const WaitReason& reason) const;

  const std::shared_ptr<SharedCommunicator> communicator_;
  const std::vector<int64_t> devices_;
  const int generation_;
  Crew& crew_;
  const Hooks hooks_;

  // Of the thread that conducts.
  Alignment alignment_;
  std::unordered_map<uint64_t, std::string> texts_;  // by signature

  std::atomic<std::thread::id> closing_thread_;

  mutable std::mutex mutex_;  // guards all below
  std::condition_variable changed_;
  std::deque<std::shared_ptr<Gang>> complete_;
  bool is_conducting_ = false;
  int64_t next_call_ = 0;
  std::exception_ptr failure_;
};

}  // namespace jax_ub
