#include "transport/cpu/fate.h"

#include <new>
#include <sstream>
#include <utility>

#include "platform/error.h"
#include "platform/file_descriptor.h"
#include "transport/process/message.h"

namespace jax_ub {

namespace {

// Where there is no memory to say more.
const std::string kLost = "is lost";

}  // namespace

Fate::Fate(std::vector<Member> members)
    : members_(std::move(members)),
      gone_(new std::atomic<const std::string*>[members_.size()]) {
  for (size_t process = 0; process < members_.size(); ++process) {
    gone_[process].store(nullptr);
  }
}

void Fate::Poison(const std::exception_ptr& reason) {
  std::lock_guard lock(mutex_);
  if (poison_) return;
  poison_ = reason;
  poisoned_.store(true);
}

void Fate::ThrowIfPoisoned() const {
  if (!poisoned_.load()) return;
  std::lock_guard lock(mutex_);
  std::rethrow_exception(poison_);
}

void Fate::SetGone(int process, const std::string& how) {
  std::lock_guard lock(mutex_);
  if (IsGone(process)) return;
  const bool has_closed = how.empty();
  if (!has_closed && first_lost_ == kNobody) first_lost_ = process;
  try {
    hows_.push_back(
        std::make_unique<const std::string>(has_closed ? kGoodbyeText : how));
    gone_[process].store(hows_.back().get());
  } catch (const std::bad_alloc&) {
    gone_[process].store(&kLost);
  }
}

std::string Fate::DescribeGone(int process) const {
  return members_[process].name + " " + *gone_[process].load();
}

std::string Fate::DescribeState(int process) const {
  return DescribeIfStopped(members_[process].pid);
}

void Fate::Throw(int gone, const WaitReason& reason, const Waiting& waiting) const {
  ThrowIfPoisoned();
  std::ostringstream text;
  text << "CommunicatorError: jax_ub." << reason.label << ": ";
  if (gone != kNobody) {
    // Who closed because another one had died is not the reason.
    std::lock_guard lock(mutex_);
    if (first_lost_ != kNobody) gone = first_lost_;
    text << DescribeGone(gone) << "; " << waiting.who << " waited for " << waiting.what;
    throw CommunicatorError(text.str());
  }
  text << waiting.who << " waited " << reason.timeout_s << " s for " << waiting.what
       << ". " << reason.setting << " sets the seconds.";
  throw DeadlineError(text.str());
}

}  // namespace jax_ub
