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
struct Waiting {
  std::string who;
  std::string what;
};

class Fate {
 public:
  static constexpr int kNobody = -1;

  struct Member {
    std::string name;  // "rank 2 (process 1, pid 123)"
    pid_t pid = 0;     // as seen from here; 0: it is not
  };

  explicit Fate(std::vector<Member> members);

  // Fails all waits from now on. The first reason holds.
  void Poison(const std::exception_ptr& reason);
  void ThrowIfPoisoned() const;

  // How a process was lost: "died"; or "", it closed in order. What comes first holds.
  void SetGone(int process, const std::string& how);
  bool IsGone(int process) const { return gone_[process].load() != nullptr; }

  const std::string& name(int process) const { return members_[process].name; }
  // " (it is stopped)" or nothing: for the messages of a wait.
  std::string DescribeState(int process) const;

  // Waits until `reached()`. Otherwise throws the poison; or CommunicatorError, when
  // `gone()` is a process that has gone and is waited for, not kNobody; or
  // DeadlineError.
  //
  // What has come is looked at again behind the reason to give up: a process that did
  // its part and then left has done its part.
  template <typename Reached, typename Gone, typename Describe>
  void Await(Doorbell& own,
             const WaitReason& reason,
             const Reached& reached,
             const Gone& gone,
             const Describe& describe) const {
    jax_ub::Await(own, reason.timeout_s,
                  [&] { return reached() || poisoned_.load() || gone() != kNobody; });
    if (reached()) return;
    Throw(gone(), reason, describe());
  }

 private:
  // "rank 2 (process 1, pid 123) died".
  std::string DescribeGone(int process) const;
  [[noreturn]] void Throw(int gone,
                          const WaitReason& reason,
                          const Waiting& waiting) const;

  const std::vector<Member> members_;                        // [process]
  std::unique_ptr<std::atomic<const std::string*>[]> gone_;  // [process]: how, in hows_
  std::atomic<bool> poisoned_{false};

  mutable std::mutex mutex_;  // guards all below
  std::exception_ptr poison_;
  std::vector<std::unique_ptr<const std::string>> hows_;
  int first_lost_ = kNobody;
};

}  // namespace jax_ub
