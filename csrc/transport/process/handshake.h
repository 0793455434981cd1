// Connects the processes of a group pairwise. Each process dials the processes with
// lower indices. The two sides of a connection may pass each other the descriptor of
// their memory.
//
//   dialer                                     listener
//   connect                                    accept; check that the user is the same
//   send Hello(listener's token), memory  -->  check that token and setup are its own
//   check that token and setup are its own <-- send Hello(dialer's token), memory
//
// Each process also dials the processes with higher indices, but sends nothing on these
// connections. The kernel closes such a *liveness socket* when the endpoint that it was
// dialed to closes, so that the process does not wait for a peer that died before it
// connected. A process that fails sends the reason to all peers before its endpoint
// closes; on a liveness socket it first sends a Hello to identify itself. A peer that
// loses the process therefore receives the reason, if there is one, before the loss.
#pragma once

#include <sys/types.h>

#include <deque>
#include <functional>
#include <map>
#include <string>
#include <vector>

#include "platform/deadline.h"
#include "platform/file_descriptor.h"
#include "transport/process/message.h"
#include "transport/process/process_group.h"

namespace jax_ub {

// The address at which a process accepts connections from the other processes of a
// group: a listening Unix socket. Its random name is in the abstract namespace, so no
// file is left behind. It only accepts processes of the same user that send the token.
class Endpoint {
 public:
  Endpoint();

  const PeerAddress& address() const { return address_; }
  const FileDescriptor& listener() const { return listener_; }

 private:
  PeerAddress address_;
  FileDescriptor listener_;
};

// A peer after the handshake: its connection, its pids, and the messages that it sent
// before the handshake ended.
struct ConnectedPeer {
  FileDescriptor connection;
  int pid = 0;              // in the peer's own pid namespace, for error messages
  pid_t seen_pid = 0;       // in this process's pid namespace; 0: not visible in it
  bool has_closed = false;  // whether the peer has already sent its close message
  // Setup messages that arrived before this process had finished its handshake.
  std::deque<Message> early_messages;
};

class Handshake {
 public:
  // Called when a peer connects. `memory` is the descriptor of the peer's memory, or
  // empty if the peer sent none. If the function throws, the handshake fails on all
  // processes.
  using Take = std::function<void(
      int process_index, const ConnectedPeer&, FileDescriptor memory)>;

  // `peers` is keyed by process number. Processes without an entry are not connected.
  // `setup` describes the group and the memory layout, and must be equal in all
  // processes. `memory` may be empty. All arguments that are references must outlive
  // the object.
  Handshake(const Endpoint& endpoint,
            const ProcessGroup& group,
            const std::map<int, PeerAddress>& peers,
            std::string setup,
            const FileDescriptor& memory,
            Take take);

  // Connects to all peers, and returns them by process index. The entries of this
  // process and of processes without an address have no connection. Throws
  // CommunicatorError if a process refuses or fails, and DeadlineError after the
  // timeout.
  std::vector<ConnectedPeer> Run(double timeout_s);

 private:
  // The state of the handshake with one peer. For a peer of lower index, this process
  // connects and sends a Hello: kUndialed, kHelloSent, kConnected. For a peer of higher
  // index, it has a liveness socket until the peer connects: kUndialed,
  // kLivenessSocket, kHelloSent, kConnected. The handshake ends when all peers are
  // connected or one is lost.
  enum class Stage { kUndialed, kLivenessSocket, kHelloSent, kConnected, kLost };

  std::vector<ConnectedPeer> RunUntil(const Deadline& deadline);
  bool DialAll(const Deadline& deadline);
  void DialOne(int process_index, const Deadline& deadline);
  // Sends a Hello to a process. Throws DeadlineError if the kernel has no memory for
  // the message before the deadline.
  void Greet(int process_index, const Deadline& deadline);
  void AcceptAll();
  void HandleUnidentified(size_t index, const Deadline& deadline);
  void HandleMessage(int process_index);
  void Check(int process_index, const Hello& hello);
  void Connect(int process_index, const Hello& hello, FileDescriptor memory);
  Hello HelloTo(int process_index) const;
  bool IsReached(int process_index) const {
    return process_index != group_.own() &&
           peers_.count(group_.process_ids()[process_index]) != 0;
  }
  bool IsWaited(int process_index) const {
    return IsReached(process_index) && stages_[process_index] != Stage::kConnected;
  }
  // Records that a process is lost. RunUntil reports the loss only after it has read
  // all pending messages, because one of them may have the reason.
  void MarkLost(int process_index, const std::string& how);
  void BroadcastFailure(MessageKind kind, const std::string& text);
  [[noreturn]] void Fail(const std::string& text) const;
  [[noreturn]] void FailExpired(double timeout_s) const;

  const Endpoint& endpoint_;
  const ProcessGroup& group_;
  const std::map<int, PeerAddress>& peers_;
  const std::string setup_;
  const FileDescriptor& memory_;
  const Take take_;
  std::vector<Stage> stages_;                   // indexed by process index
  std::vector<ConnectedPeer> connected_peers_;  // indexed by process index
  // Accepted connections on which no message has arrived yet, so that their senders are
  // unknown.
  std::vector<FileDescriptor> unidentified_;
  std::string loss_;      // describes the first process that was lost; or ""
  int num_rejected_ = 0;  // connections from unknown processes that were closed
};

}  // namespace jax_ub
