#include "transport/cpu/peer_status.h"

#include <new>
#include <sstream>
#include <utility>

#include "platform/error.h"
#include "platform/file_descriptor.h"
#include "transport/process/message.h"

namespace jax_ub {

namespace {

// Describes a lost process if there is no memory for a more detailed description.
const std::string kLost = "is lost";

}  // namespace

PeerStatus::PeerStatus(std::vector<PeerName> peers)
    : peers_(std::move(peers)),
      lost_(new std::atomic<const std::string*>[peers_.size()]) {
  for (size_t process = 0; process < peers_.size(); ++process) {
    lost_[process].store(nullptr);
  }
}

void PeerStatus::Poison(const std::exception_ptr& reason) {
  std::lock_guard lock(mutex_);
  if (poison_) return;
  poison_ = reason;
  poisoned_.store(true);
}

void PeerStatus::ThrowIfPoisoned() const {
  if (!poisoned_.load()) return;
  std::lock_guard lock(mutex_);
  std::rethrow_exception(poison_);
}

std::exception_ptr PeerStatus::poison() const {
  std::lock_guard lock(mutex_);
  return poison_;
}

void PeerStatus::SetLost(int process, const std::string& how) {
  std::lock_guard lock(mutex_);
  if (IsLost(process)) return;
  const bool has_closed = how.empty();
  if (!has_closed && first_lost_ == kNoProcess) first_lost_ = process;
  try {
    loss_reasons_.push_back(
        std::make_unique<const std::string>(has_closed ? kCloseText : how));
    lost_[process].store(loss_reasons_.back().get());
  } catch (const std::bad_alloc&) {
    lost_[process].store(&kLost);
  }
}

std::string PeerStatus::DescribeLoss(int process) const {
  return peers_[process].name + " " + *lost_[process].load();
}

std::string PeerStatus::DescribeState(int process) const {
  return DescribeIfStopped(peers_[process].pid);
}

void PeerStatus::Throw(int lost,
                       const WaitReason& reason,
                       const WaitDescription& waiting) const {
  ThrowIfPoisoned();
  std::ostringstream text;
  text << "CommunicatorError: jax_ub." << reason.label << ": ";
  if (lost != kNoProcess) {
    // If one process died and another one closed its communicator, the error names the
    // process that died, because the other one may have closed as a consequence.
    std::lock_guard lock(mutex_);
    if (first_lost_ != kNoProcess) lost = first_lost_;
    text << DescribeLoss(lost) << "; " << waiting.who << " waited for " << waiting.what;
    throw CommunicatorError(text.str());
  }
  text << waiting.who << " waited " << reason.timeout_s << " s for " << waiting.what
       << ". " << reason.setting << " sets the seconds.";
  throw DeadlineError(text.str());
}

}  // namespace jax_ub
