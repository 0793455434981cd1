// Why the processes of a communicator are of no more use to each other: the first reason,
// and how it travels between them.
//
// Everybody is told before any own wait ends, whoever noticed first: so whoever leaves
// because of a failure has said why before, and no peer takes its leaving for the reason.
#pragma once

#include <sys/types.h>

#include <atomic>
#include <exception>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <string_view>
#include <vector>

#include "platform/error.h"
#include "transport/process/handshake.h"
#include "transport/process/message.h"
#include "transport/process/peer_connections.h"
#include "transport/process/process_group.h"

namespace jax_ub {

class GroupFailure {
 public:
  // What its owner does of it. The two that end waits are called with locks held, so that
  // whoever has seen its wait fail finds the reason: they do not come back here.
  struct Hooks {
    // Ends all own waits that have not ended.
    std::function<void(const std::exception_ptr& poison)> fail_waits;
    // That a process was lost: "died"; or closed in order: "". Once of each.
    std::function<void(int process, const std::string& how)> set_lost;
    // Of MessageKind::kSignature; may be none.
    std::function<void(const PeerEvent&)> on_signature;
  };

  GroupFailure(const ProcessGroup& group, Hooks hooks);  // which outlives it
  ~GroupFailure();  // in a copy, by fork, tells nobody

  // Once, and before anything else, with [process] of a handshake, whose connections it
  // takes. Hooks are called from here on. Throws as Peers::Watch.
  void Watch(std::vector<ConnectedPeer>& connected_peers);

  // Tells all peers and ends all own waits; the first poison holds.
  void Poison(const std::exception_ptr& reason);

  // Poison, a process that died, Close: what came first, or nullptr. Cheap.
  std::exception_ptr reason() const;
  // Called once, without a lock, when there begins to be a reason; at once if there is.
  void OnReason(std::function<void(const std::exception_ptr&)> callback);

  // To all peers.
  void Broadcast(MessageKind kind, std::string_view body) {
    peers_->Broadcast(kind, body);
  }
  void SendClose();  // once
  // Says goodbye, ends the own waits that are left, hears no more. Idempotent.
  void Close();
  CommunicatorError OwnClose() const;

  // In a child of fork, which has no part in this: its parent goes on.
  bool IsForkedChild() const;

 private:
  void Hear(const PeerEvent& news);
  void SetLost(int process, const std::string& how);
  void Fail(std::unique_lock<std::mutex> saying,
            const std::exception_ptr& reason,
            const std::function<void()>& fail_waits);

  const ProcessGroup& group_;
  const Hooks hooks_;
  const pid_t owner_;
  std::vector<std::string> names_;  // [process]
  std::vector<bool> is_lost_;       // [process]; belongs to the thread of peers_
  std::atomic<bool> has_sent_close_{false};
  std::atomic<bool> is_closed_{false};

  std::mutex broadcast_mutex_;  // held from what peers are told to what follows from it
  bool is_poisoned_ = false;    // guarded by it

  mutable std::mutex mutex_;  // guards the three below
  std::exception_ptr reason_;
  std::atomic<bool> has_reason_{false};  // read without
  std::function<void(const std::exception_ptr&)> on_reason_;

  std::unique_ptr<PeerConnections> peers_;  // the last: its thread uses what is above
};

}  // namespace jax_ub
