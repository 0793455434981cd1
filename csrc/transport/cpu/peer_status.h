// What has become of a communicator and its processes, as far as this process knows;
// and waits, which end by that.
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

// What a wait that fails says: "rank 0 waited 3 s for chunk 2 of rank 1".
struct WaitDescription {
  std::string who;
  std::string what;
};

class PeerStatus {
 public:
  static constexpr int kNoProcess = -1;

  struct PeerName {
    std::string name;  // "rank 2 (process 1, pid 123)"
    pid_t pid = 0;     // as seen from here; 0: it is not
  };

  explicit PeerStatus(std::vector<PeerName> peers);

  // Fails all waits from now on. The first reason holds.
  void Poison(const std::exception_ptr& reason);
  void ThrowIfPoisoned() const;

  // How a process was lost: "died"; or "", it closed in order. What comes first holds.
  void SetLost(int process, const std::string& how);
  bool IsLost(int process) const { return lost_[process].load() != nullptr; }

  const std::string& name(int process) const { return peers_[process].name; }
  // " (it is stopped)" or nothing: for the messages of a wait.
  std::string DescribeState(int process) const;

  // Waits until `reached()`. Otherwise throws the poison; or CommunicatorError, when
  // `gone()` is a process that has gone and is waited for, not kNoProcess; or
  // DeadlineError.
  //
  // What has come is looked at again behind the reason to give up: a process that did
  // its part and then left has done its part.
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
  // "rank 2 (process 1, pid 123) died".
  std::string DescribeLoss(int process) const;
  [[noreturn]] void Throw(int lost,
                          const WaitReason& reason,
                          const WaitDescription& waiting) const;

  const std::vector<PeerName> peers_;  // [process]
  std::unique_ptr<std::atomic<const std::string*>[]>
      lost_;  // [process]: how, in loss_reasons_
  std::atomic<bool> poisoned_{false};

  mutable std::mutex mutex_;  // guards all below
  std::exception_ptr poison_;
  std::vector<std::unique_ptr<const std::string>> loss_reasons_;
  int first_lost_ = kNoProcess;
};

}  // namespace jax_ub
