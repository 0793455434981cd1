// The open connections to the other processes of a communicator. The kernel closes a
// process's end when it dies, in whatever way: a thread watches for that, and for what
// the peers say.
#pragma once

#include <sys/types.h>

#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <string_view>
#include <thread>
#include <vector>

#include "platform/file_descriptor.h"
#include "transport/process/message.h"

namespace jax_ub {

struct Peer {
  int process = 0;  // its place
  FileDescriptor connection;
  pid_t pid = 0;  // as seen from here; 0: it is not
};

struct PeerNews {
  enum Kind { kPoisoned, kPoisonedByDeadline, kStated, kClosed, kLost };
  int process = 0;
  Kind kind = kLost;
  std::string text;  // the poison's reason; the statement; or how it was lost
};

class Peers {
 public:
  explicit Peers(std::vector<Peer> peers);
  ~Peers();  // Close

  // Once, and before anything else. `tell` is called from the watching thread; of a death
  // it may hear from several.
  void Watch(std::function<void(const PeerNews&)> tell);

  // To every peer; never blocks.
  void Say(MessageKind kind, std::string_view body);

  // Ends the watching and the connections. Not from `tell`. Idempotent.
  void Close();

  // In a child of fork: closes the descriptors; the thread is the parent's.
  void Forget();

 private:
  struct Watched {
    int process = 0;
    FileDescriptor connection;
    FileDescriptor life;  // readable when the process has died; may be none
    bool has_left = false;
  };

  void Run() noexcept;
  void RunUntilStopped();
  // Passes on what has come.
  void Hear(Watched& peer, bool has_died);
  void SetLeft(Watched& peer, PeerNews::Kind kind, const std::string& how);

  std::function<void(const PeerNews&)> tell_;
  const FileDescriptor stop_;
  std::mutex mutex_;  // guards is_closed_, and the connections' lives
  bool is_closed_ = false;
  // Watched::has_left belongs to the thread.
  std::vector<Watched> watched_;
  std::unique_ptr<std::thread> thread_;
};

}  // namespace jax_ub
