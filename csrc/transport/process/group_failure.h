// Records the first failure of a communicator and propagates it between the processes.
//
// A process sends the reason to all peers before its own waits fail. So a peer that
// then sees this process exit already knows the reason, and reports the reason instead
// of the exit.
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
  // Callbacks to the communicator. `fail_waits` and `set_lost` are called while locks
  // are held, so that reason() is already set when a wait fails. They must not call
  // GroupFailure.
  struct Hooks {
    // Makes all pending and later waits of this process fail with `poison`.
    std::function<void(const std::exception_ptr& poison)> fail_waits;
    // Records that a process is lost. `how` is a description such as "died", or empty
    // if the process closed its communicator. Called at most once per process.
    std::function<void(int process, const std::string& how)> set_lost;
    // Handles a message of MessageKind::kSignature. May be empty.
    std::function<void(const PeerEvent&)> on_signature;
  };

  // `group` must outlive the object.
  GroupFailure(const ProcessGroup& group, Hooks hooks);
  ~GroupFailure();  // in a forked child, sends no message

  // Moves the connections out of `connected_peers`, a result of Handshake::Run that is
  // indexed by process, and starts to watch them. Must be called once, before all other
  // methods. From then on, hooks may be called. Throws the errors of
  // PeerConnections::Watch.
  void Watch(std::vector<ConnectedPeer>& connected_peers);

  // Sends the reason to all peers, then fails all waits of this process. Only the first
  // call has an effect.
  void Poison(const std::exception_ptr& reason);

  // Returns the first failure, or nullptr. A failure is a poison, the death of a
  // process, or Close. If there is no failure, this function only loads an atomic.
  std::exception_ptr reason() const;
  // Sets a callback that is called once, without locks held, when the first failure
  // occurs. If there already is a failure, calls it at once.
  void OnReason(std::function<void(const std::exception_ptr&)> callback);

  // Sends a message to all peers. Never blocks: if the socket buffer of a peer is full,
  // the message is queued.
  void Broadcast(MessageKind kind, std::string_view body) {
    peers_->Broadcast(kind, body);
  }
  // Tells all peers that this process closes the communicator, so that they do not
  // report its exit as a death. Only the first call has an effect.
  void SendClose();
  // Calls SendClose, fails the remaining waits of this process, and stops receiving
  // messages. Idempotent.
  void Close();
  // Returns the error for calls after Close.
  CommunicatorError OwnClose() const;

  // Returns whether this process was forked from the process that created the object. A
  // forked child must not send messages, because the parent still uses the
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
  // Whether each process is lost, or was never connected. Indexed by process. After
  // Watch, only the thread of peers_ accesses it.
  std::vector<bool> is_lost_;
  std::atomic<bool> has_sent_close_{false};
  std::atomic<bool> is_closed_{false};

  // Held from the time when a failure is sent to the peers until the waits of this
  // process have failed. Guards is_poisoned_.
  std::mutex broadcast_mutex_;
  bool is_poisoned_ = false;

  mutable std::mutex mutex_;  // guards the three members below
  std::exception_ptr reason_;
  std::atomic<bool> has_reason_{false};  // written under mutex_, read without it
  std::function<void(const std::exception_ptr&)> on_reason_;

  // Declared last, so that it is destroyed first: its thread uses the members above.
  std::unique_ptr<PeerConnections> peers_;
};

}  // namespace jax_ub
