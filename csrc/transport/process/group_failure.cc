#include "transport/process/group_failure.h"

#include <unistd.h>

#include <new>
#include <utility>

#include "platform/error.h"

namespace jax_ub {

namespace {

constexpr char kOutOfMemory[] = "CommunicatorError: jax_ub: a peer is out of memory";

}  // namespace

GroupFailure::GroupFailure(const ProcessGroup& group, Hooks hooks)
    : group_(group), hooks_(std::move(hooks)), owner_(getpid()) {}

GroupFailure::~GroupFailure() {
  if (peers_ && IsForkedChild()) peers_->DetachAfterFork();
}

bool GroupFailure::IsForkedChild() const { return getpid() != owner_; }

void GroupFailure::Watch(std::vector<ConnectedPeer>& connected_peers) {
  std::vector<Peer> connected;
  for (int p = 0; p < group_.num_processes(); ++p) {
    ConnectedPeer& peer = connected_peers[p];
    names_.push_back(group_.Describe(p, peer.pid));
    is_lost_.push_back(!peer.connection || peer.has_closed);
    if (peer.has_closed) hooks_.set_lost(p, "");
    if (is_lost_[p]) continue;
    // In tests, a process may be its own peer. Such a process does not watch itself,
    // because it need not detect its own death.
    const pid_t life = peer.seen_pid == owner_ ? 0 : peer.seen_pid;
    connected.push_back({p, std::move(peer.connection), life});
  }
  peers_ = std::make_unique<PeerConnections>(std::move(connected));
  if (group_.num_processes() == 1) return;
  peers_->Watch(
      group_, [this](const PeerEvent& event) { OnPeerEvent(event); },
      [this](const std::exception_ptr& reason) { Poison(reason); });
}

void GroupFailure::OnPeerEvent(const PeerEvent& event) {
  switch (event.kind) {
    case MessageKind::kPoison:
      return Poison(std::make_exception_ptr(CommunicatorError(event.text)));
    case MessageKind::kDeadlinePoison:
      return Poison(std::make_exception_ptr(DeadlineError(event.text)));
    case MessageKind::kDeathNotice:
    case MessageKind::kClose:
      return SetLost(event.process, event.text);
    case MessageKind::kSignature:
      if (hooks_.on_signature) hooks_.on_signature(event);
      return;
    case MessageKind::kHello:
    case MessageKind::kSetupMessage:
    case MessageKind::kSetupDescriptor:
      return;
  }
}

void GroupFailure::Poison(const std::exception_ptr& reason) {
  if (IsForkedChild()) return;
  std::unique_lock broadcasting(broadcast_mutex_);
  if (is_poisoned_) return;
  try {
    PoisonMessage poison_message = PoisonMessageOf(reason);
    if (!poison_message.text.starts_with("CommunicatorError: ")) {
      poison_message.text = group_.ErrorPrefix() + names_[group_.own()] +
                            " failed: " + poison_message.text;
    }
    Broadcast(poison_message.kind, poison_message.text);
  } catch (const std::bad_alloc&) {
    try {
      Broadcast(MessageKind::kPoison, kOutOfMemory);
    } catch (const std::bad_alloc&) {
      // If memory is exhausted, the peers get no message, and their waits end at the
      // deadline.
    }
  }
  is_poisoned_ = true;
  Fail(std::move(broadcasting), reason, [&] { hooks_.fail_waits(reason); });
}

void GroupFailure::SetLost(int process, const std::string& how) {
  // The index comes from a peer's death notice. It may be invalid, or the index of a
  // process that is already lost.
  if (process < 0 || process >= group_.num_processes() || is_lost_[process]) return;
  is_lost_[process] = true;
  if (how.empty()) return hooks_.set_lost(process, how);
  std::unique_lock broadcasting(broadcast_mutex_);
  std::exception_ptr reason;
  try {
    reason = std::make_exception_ptr(
        CommunicatorError(group_.ErrorPrefix() + names_[process] + " " + how));
    Broadcast(MessageKind::kDeathNotice, std::to_string(process));
  } catch (const std::bad_alloc&) {
    if (!reason) reason = std::current_exception();
  }
  Fail(std::move(broadcasting), reason, [&] { hooks_.set_lost(process, how); });
}

void GroupFailure::Fail(std::unique_lock<std::mutex> broadcasting,
                        const std::exception_ptr& reason,
                        const std::function<void()>& fail_waits) {
  std::function<void(const std::exception_ptr&)> call_back;
  {
    std::lock_guard lock(mutex_);
    if (!reason_) {
      reason_ = reason;
      has_reason_.store(true);
      call_back.swap(on_reason_);
    }
    fail_waits();
  }
  broadcasting.unlock();
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

void GroupFailure::SendClose() {
  if (!has_sent_close_.exchange(true)) Broadcast(MessageKind::kClose, "");
}

CommunicatorError GroupFailure::OwnClose() const {
  const bool is_alone = group_.num_processes() == 1;
  return CommunicatorError(group_.ErrorPrefix() +
                           (is_alone ? "it" : names_[group_.own()]) +
                           " closed its communicator");
}

void GroupFailure::Close() {
  if (IsForkedChild() || is_closed_.exchange(true)) return;
  const auto reason = std::make_exception_ptr(OwnClose());
  std::unique_lock broadcasting(broadcast_mutex_);
  SendClose();
  is_poisoned_ = true;
  Fail(std::move(broadcasting), reason, [&] { hooks_.fail_waits(reason); });
  peers_->Close();
}

}  // namespace jax_ub
