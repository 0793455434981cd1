// Records whether a communicator has failed, and which of its processes this process
// knows to be lost. A wait ends with an error if its condition can therefore not become
// true.
#pragma once

#include <sys/types.h>

#include <atomic>
#include <exception>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "transport/cpu/doorbell.h"
#include "transport/transport.h"

namespace jax_ub {

// The two parts of the error message of a wait: "<who> waited 3 s for <what>".
struct WaitDescription {
  std::string who;   // "rank 0"
  std::string what;  // "chunk 2 of rank 1"
};

class PeerStatus {
 public:
  static constexpr int kNoProcess = -1;

  struct PeerName {
    std::string name;  // "rank 2 (process 1, pid 123)"
    pid_t pid = 0;     // in this process's pid namespace; 0: not visible in it
  };

  explicit PeerStatus(std::vector<PeerName> peers);

  // Makes all later waits fail with `reason`. The caller must also wake the pending
  // waits. Only the first call has an effect.
  void Poison(const std::exception_ptr& reason);
  void ThrowIfPoisoned() const;
  std::exception_ptr poison() const;  // the reason, or nullptr

  // Records that a process is lost. `how` is a description such as "died". `how` is
  // empty if the process closed its communicator without a failure. Only the first call
  // per process has an effect.
  void SetLost(int process, const std::string& how);
  bool IsLost(int process) const { return lost_[process].load() != nullptr; }

  const std::string& name(int process) const { return peers_[process].name; }
  // Returns " (it is stopped)" for a stopped process, and otherwise "". The error
  // messages of waits contain this text.
  std::string DescribeState(int process) const;

  // Waits until `reached()` is true. Throws the reason passed to Poison, if there is
  // one. Throws CommunicatorError if `lost()` returns a lost process on which this wait
  // depends; `lost()` returns kNoProcess if there is none. Throws DeadlineError after
  // the timeout.
  //
  // Evaluates `reached()` once more before it throws, because a peer may store the
  // awaited value and exit before this thread wakes. Then the wait succeeds.
  template <typename Reached, typename Lost, typename Describe>
  void Await(Doorbell& own,
             const WaitReason& reason,
             const Reached& reached,
             const Lost& lost,
             const Describe& describe) const {
    jax_ub::Await(own, reason.timeout_s, [&] {
      return reached() || poisoned_.load() || lost() != kNoProcess;
    });
    if (reached()) return;
    Throw(lost(), reason, describe());
  }

 private:
  // Returns a text such as "rank 2 (process 1, pid 123) died".
  std::string DescribeLoss(int process) const;
  [[noreturn]] void Throw(int lost,
                          const WaitReason& reason,
                          const WaitDescription& waiting) const;

  const std::vector<PeerName> peers_;  // indexed by process
  // Indexed by process: a description of how the process was lost, which loss_reasons_
  // owns, or nullptr if the process is not lost.
  std::unique_ptr<std::atomic<const std::string*>[]> lost_;
  std::atomic<bool> poisoned_{false};

  mutable std::mutex mutex_;  // guards the members below
  std::exception_ptr poison_;
  std::vector<std::unique_ptr<const std::string>> loss_reasons_;
  // The first process that was lost without closing its communicator. Errors report it
  // as the cause. kNoProcess: there is none.
  int first_lost_ = kNoProcess;
};

}  // namespace jax_ub
