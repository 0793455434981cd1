// The open connections to the other processes of a communicator. The kernel closes a
// process's end when it dies, in whatever way: a thread watches for that, and for what
// the peers say.
#pragma once

#include <sys/types.h>

#include <deque>
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
  int process = 0;  // its place
  FileDescriptor connection;
  pid_t pid = 0;  // as seen from here; 0: it is not
};

struct PeerEvent {
  int process = 0;  // who says it, or of whom it is an death notice
  MessageKind kind = MessageKind::kDeathNotice;
  std::string text;  // of an death notice: how it was lost
};

class PeerConnections {
 public:
  explicit PeerConnections(std::vector<Peer> peers);
  ~PeerConnections();  // Close

  // Once, and before anything else. `tell` is called from the watching thread; of a death
  // it may hear from several. Throws CommunicatorError, as the peers are told, where the
  // system lends no thread or descriptor.
  void Watch(const ProcessGroup& group, std::function<void(const PeerEvent&)> tell);

  // To every peer, in the order in which it is said; never blocks. What a peer does not
  // read yet is kept for it.
  void Broadcast(MessageKind kind, std::string_view body);

  // Ends the watching and the connections; what is still kept is lost. Not from `tell`.
  // Idempotent.
  void Close();

  // In a child of fork: closes the descriptors; the thread is the parent's.
  void DetachAfterFork();

 private:
  struct Watched {
    int process = 0;
    FileDescriptor connection;
    FileDescriptor life;      // readable when the process has died; may be none
    bool has_closed = false;  // belongs to the thread
    std::deque<std::pair<MessageKind, std::string>> unsent;  // the connection is full
  };

  void Run() noexcept;
  void RunUntilStopped();
  void FlushUnsent(Watched& peer);
  // Passes on what has come.
  void Hear(Watched& peer, bool has_died);
  void SetLost(Watched& peer, const char* why) noexcept;
  void SetLeft(Watched& peer, MessageKind kind, const std::string& how);

  std::function<void(const PeerEvent&)> tell_;
  FileDescriptor wake_;  // the thread looks again
  std::mutex mutex_;  // guards is_closed_, Watched::unsent and the connections' lives
  bool is_closed_ = false;
  std::vector<Watched> watched_;
  std::unique_ptr<Thread> thread_;
};

}  // namespace jax_ub
