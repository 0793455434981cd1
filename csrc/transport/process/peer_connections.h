// The open connections to the other processes of a communicator. A thread watches them
// for messages, and for the death of a peer: when a process dies for any reason, the
// kernel closes its end of the connection.
#pragma once

#include <sys/types.h>

#include <deque>
#include <exception>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "platform/file_descriptor.h"
#include "platform/thread.h"
#include "transport/process/message.h"
#include "transport/process/process_group.h"

namespace jax_ub {

struct Peer {
  int process = 0;  // the process index
  FileDescriptor connection;
  pid_t pid = 0;  // in this process's pid namespace; 0: not visible in it
};

// A message from a peer, or the notification that a process is lost.
struct PeerEvent {
  int process = 0;  // the sender; for kDeathNotice, the process that was lost
  MessageKind kind = MessageKind::kDeathNotice;
  std::string text;  // the message's body; for kDeathNotice, how the process was lost
};

class PeerConnections {
 public:
  explicit PeerConnections(std::vector<Peer> peers);
  ~PeerConnections();  // calls Close

  // Starts a thread that calls `on_event` for each event. Must be called once, before
  // all other methods. A death may be reported several times: when the connection
  // closes, and by the death notice of each peer. If an exception ends the thread, the
  // thread first calls `on_failure` and reports all peers as lost. If the system
  // provides no thread or no descriptor, Watch sends the reason to the peers and throws
  // it as CommunicatorError.
  void Watch(const ProcessGroup& group,
             std::function<void(const PeerEvent&)> on_event,
             std::function<void(const std::exception_ptr&)> on_failure);

  // Sends a message to every peer. Never blocks: if the socket buffer of a peer is
  // full, the message is queued. Each peer receives the messages in order.
  void Broadcast(MessageKind kind, std::string_view body);

  // Stops the thread, closes the connections and discards queued messages. Must not be
  // called from a callback. Idempotent.
  void Close();

  // Closes the descriptors in a forked child, which does not have the thread.
  void DetachAfterFork();

 private:
  struct Watched {
    int process = 0;
    FileDescriptor connection;
    FileDescriptor life;      // becomes readable when the process dies; may be empty
    bool has_closed = false;  // closed or died; used by the watching thread only
    // Messages for which the socket buffer has no room yet.
    std::deque<std::pair<MessageKind, std::string>> unsent;
  };

  void Run() noexcept;
  void RunUntilStopped();
  void FlushUnsent(Watched& peer);
  // Reads all pending messages of a peer, and passes them to on_event_.
  void Receive(Watched& peer, bool has_died);
  void SetLost(Watched& peer, const char* why) noexcept;
  void SetLeft(Watched& peer, MessageKind kind, const std::string& how);

  std::function<void(const PeerEvent&)> on_event_;
  std::function<void(const std::exception_ptr&)> on_failure_;
  // Wakes the thread after is_closed_ or Watched::unsent has changed (an eventfd).
  FileDescriptor wake_;
  // Guards is_closed_, Watched::unsent, and the closing of connections.
  std::mutex mutex_;
  bool is_closed_ = false;
  std::vector<Watched> watched_;
  std::unique_ptr<Thread> thread_;
};

}  // namespace jax_ub
