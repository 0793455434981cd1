#include "transport/process/group_failure.h"

#include <unistd.h>

#include <new>
#include <utility>

#include "platform/error.h"

namespace jax_ub {

namespace {

constexpr char kOutOfMemory[] = "CommunicatorError: jax_ub: a peer is out of memory";

}  // namespace

GroupFailure::GroupFailure(const Group& group, Hooks hooks)
    : group_(group), hooks_(std::move(hooks)), owner_(getpid()) {}

GroupFailure::~GroupFailure() {
  if (peers_ && IsCopy()) peers_->Forget();
}

bool GroupFailure::IsCopy() const { return getpid() != owner_; }

void GroupFailure::Watch(std::vector<Partner>& partners) {
  std::vector<Peer> connected;
  for (int p = 0; p < group_.num_processes(); ++p) {
    Partner& partner = partners[p];
    names_.push_back(group_.Describe(p, partner.pid));
    is_gone_.push_back(!partner.connection || partner.has_left);
    if (partner.has_left) hooks_.set_gone(p, "");
    if (is_gone_[p]) continue;
    // A process that is its own peer, in tests, does not outlive itself.
    const pid_t life = partner.seen_pid == owner_ ? 0 : partner.seen_pid;
    connected.push_back({p, std::move(partner.connection), life});
  }
  peers_ = std::make_unique<Peers>(std::move(connected));
  if (group_.num_processes() == 1) return;
  peers_->Watch(group_, [this](const PeerNews& news) { Hear(news); });
}

void GroupFailure::Hear(const PeerNews& news) {
  switch (news.kind) {
    case MessageKind::kPoison:
      return Poison(std::make_exception_ptr(CommunicatorError(news.text)));
    case MessageKind::kDeadlinePoison:
      return Poison(std::make_exception_ptr(DeadlineError(news.text)));
    case MessageKind::kObituary:
    case MessageKind::kGoodbye:
      return SetGone(news.process, news.text);
    case MessageKind::kStatement:
      if (hooks_.hear_statement) hooks_.hear_statement(news);
      return;
    case MessageKind::kHello:
    case MessageKind::kNote:
    case MessageKind::kNotePassed:
      return;
  }
}

void GroupFailure::Poison(const std::exception_ptr& reason) {
  if (IsCopy()) return;
  std::unique_lock saying(saying_mutex_);
  if (is_poisoned_) return;
  try {
    PoisonMessage told = PoisonMessageOf(reason);
    if (!told.text.starts_with("CommunicatorError: ")) {
      told.text = group_.ErrorPrefix() + names_[group_.own()] + " failed: " + told.text;
    }
    Say(told.kind, told.text);
  } catch (const std::bad_alloc&) {
    try {
      Say(MessageKind::kPoison, kOutOfMemory);
    } catch (const std::bad_alloc&) {
      // The peers wait until their deadline.
    }
  }
  is_poisoned_ = true;
  Fail(std::move(saying), reason, [&] { hooks_.end_waits(reason); });
}

void GroupFailure::SetGone(int process, const std::string& how) {
  // What a peer says of others may be old, or nonsense.
  if (process < 0 || process >= group_.num_processes() || is_gone_[process]) return;
  is_gone_[process] = true;
  if (how.empty()) return hooks_.set_gone(process, how);
  std::unique_lock saying(saying_mutex_);
  std::exception_ptr reason;
  try {
    reason = std::make_exception_ptr(
        CommunicatorError(group_.ErrorPrefix() + names_[process] + " " + how));
    Say(MessageKind::kObituary, std::to_string(process));
  } catch (const std::bad_alloc&) {
    if (!reason) reason = std::current_exception();
  }
  Fail(std::move(saying), reason, [&] { hooks_.set_gone(process, how); });
}

void GroupFailure::Fail(std::unique_lock<std::mutex> saying,
                        const std::exception_ptr& reason,
                        const std::function<void()>& end_waits) {
  std::function<void(const std::exception_ptr&)> call_back;
  {
    std::lock_guard lock(mutex_);
    if (!reason_) {
      reason_ = reason;
      has_reason_.store(true);
      call_back.swap(on_reason_);
    }
    end_waits();
  }
  saying.unlock();
  if (call_back) call_back(reason);
}

std::exception_ptr GroupFailure::reason() const {
  if (!has_reason_.load()) return nullptr;
  std::lock_guard lock(mutex_);
  return reason_;
}

void GroupFailure::OnReason(std::function<void(const std::exception_ptr&)> callback) {
  {
    std::lock_guard lock(mutex_);
    if (!reason_) {
      on_reason_ = std::move(callback);
      return;
    }
  }
  callback(reason());
}

void GroupFailure::SayGoodbye() {
  if (!has_said_goodbye_.exchange(true)) Say(MessageKind::kGoodbye, "");
}

CommunicatorError GroupFailure::OwnClose() const {
  const bool is_alone = group_.num_processes() == 1;
  return CommunicatorError(group_.ErrorPrefix() +
                           (is_alone ? "it" : names_[group_.own()]) +
                           " closed its communicator");
}

void GroupFailure::Close() {
  if (IsCopy() || is_closed_.exchange(true)) return;
  const auto reason = std::make_exception_ptr(OwnClose());
  std::unique_lock saying(saying_mutex_);
  SayGoodbye();
  is_poisoned_ = true;
  Fail(std::move(saying), reason, [&] { hooks_.end_waits(reason); });
  peers_->Close();
}

}  // namespace jax_ub
