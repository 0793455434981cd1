// Records the first failure of a communicator and propagates it between the processes.
//
// A process sends the reason to all peers before it fails its own waits. A peer that
// then sees the process exit already knows the reason, and does not report the exit
// instead.
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
  // Callbacks of the communicator. `fail_waits` and `set_lost` are called with locks
  // held, so that a thread whose wait has failed finds the reason in reason(). They
  // must not call methods of GroupFailure.
  struct Hooks {
    // Makes all pending and future waits of this process fail.
    std::function<void(const std::exception_ptr& poison)> fail_waits;
    // Records that a process is lost. `how` is, for example, "died", or empty if the
    // process closed in order. Called at most once for each process.
    std::function<void(int process, const std::string& how)> set_lost;
    // Handles a message of kind MessageKind::kSignature. May be empty.
    std::function<void(const PeerEvent&)> on_signature;
  };

  // `group` must outlive the object.
  GroupFailure(const ProcessGroup& group, Hooks hooks);
  ~GroupFailure();  // in a forked child, sends no message

  // Takes the connections out of `connected_peers` (indexed by process; the result of
  // Handshake::Run) and starts to watch them. Called once, before all other methods.
  // Hooks may be called from here on. Throws as PeerConnections::Watch does.
  void Watch(std::vector<ConnectedPeer>& connected_peers);

  // Sends the reason to all peers, then fails all waits of this process. Only the first
  // call takes effect.
  void Poison(const std::exception_ptr& reason);

  // Returns the first failure, or nullptr. A failure is a poison, the death of a
  // process, or Close. Cheap: without a failure it only loads an atomic.
  std::exception_ptr reason() const;
  // Sets the callback that is called once, without locks held, when reason() becomes
  // non-null. Called immediately if it is already non-null.
  void OnReason(std::function<void(const std::exception_ptr&)> callback);

  // Sends a message to all peers.
  void Broadcast(MessageKind kind, std::string_view body) {
    peers_->Broadcast(kind, body);
  }
  // Sends the close message to all peers, once.
  void SendClose();
  // Sends the close message, fails the remaining waits of this process, and stops
  // receiving messages. Idempotent.
  void Close();
  // Returns the error of calls after this process's Close.
  CommunicatorError OwnClose() const;

  // Returns whether this process is a forked child of the one that created the object.
  // A child must not send messages, because its parent continues to use the
  // communicator.
  bool IsForkedChild() const;

 private:
  void OnPeerEvent(const PeerEvent& event);
  void SetLost(int process, const std::string& how);
  void Fail(std::unique_lock<std::mutex> broadcasting,
            const std::exception_ptr& reason,
            const std::function<void()>& fail_waits);

  const ProcessGroup& group_;
  const Hooks hooks_;
  const pid_t owner_;               // the process that created this object
  std::vector<std::string> names_;  // indexed by process
  // Indexed by process. After Watch, used only by the thread of peers_.
  std::vector<bool> is_lost_;
  std::atomic<bool> has_sent_close_{false};
  std::atomic<bool> is_closed_{false};

  // Held from sending a failure to the peers until this process's waits have failed.
  // Guards is_poisoned_.
  std::mutex broadcast_mutex_;
  bool is_poisoned_ = false;

  mutable std::mutex mutex_;  // guards the three members below
  std::exception_ptr reason_;
  std::atomic<bool> has_reason_{false};  // written under mutex_, read without it
  std::function<void(const std::exception_ptr&)> on_reason_;

  // Destroyed first, because its thread uses the members above.
  std::unique_ptr<PeerConnections> peers_;
};

}  // namespace jax_ub
