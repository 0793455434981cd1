// How the processes of a group find each other: each one dials those before it, and may
// pass the descriptor of its memory on.
//
//   dialer                                   listener
//   connect                                  accept; of the same user?
//   Hello(listener's token), memory  ----->  its own token, its own setup?
//   its own token, its own setup?    <-----  Hello(dialer's token), memory
//
// Each one also dials those behind it, and says nothing: the kernel closes such a
// *liveness socket* when the endpoint there closes, so that a process that died before it
// connected is not waited for. Whoever fails tells all before its endpoint closes, those
// on its lifelines after a Hello; so who loses a process hears first if anyone said why.
#pragma once

#include <sys/types.h>

#include <deque>
#include <functional>
#include <map>
#include <string>
#include <vector>

#include "platform/deadline.h"
#include "platform/file_descriptor.h"
#include "transport/process/endpoint.h"
#include "transport/process/message.h"
#include "transport/process/process_group.h"

namespace jax_ub {

struct ConnectedPeer {
  FileDescriptor connection;
  int pid = 0;                         // as it knows itself, for messages
  pid_t seen_pid = 0;                  // as seen from here; 0: it is not
  bool has_closed = false;             // said goodbye already
  std::deque<Message> early_messages;  // what notes it has sent already
};

class Handshake {
 public:
  // Is called with each process's memory, if it passed any; what it throws is told to all.
  using Take =
      std::function<void(int place, const ConnectedPeer&, FileDescriptor memory)>;

  // `peers` by process number: who has no address there is left out. `setup` must be the
  // same everywhere. All but that outlive it.
  Handshake(const Endpoint& endpoint,
            const ProcessGroup& group,
            const std::map<int, PeerAddress>& peers,
            std::string setup,
            const FileDescriptor& memory,
            Take take);

  // Returns [place], the own one and those left out without a connection. Throws
  // CommunicatorError and DeadlineError.
  std::vector<ConnectedPeer> Run(double timeout_s);

 private:
  // Lower places are dialed and then greeted; higher ones have a liveness socket until they
  // dial. All end as connected, or one is lost.
  enum class Stage { kUndialed, kLivenessSocket, kHelloSent, kConnected, kLost };

  std::vector<ConnectedPeer> RunUntil(const Deadline& deadline);
  bool DialAll();
  void DialOne(int place);
  void AcceptAll();
  void HandleUnidentified(size_t index);
  void HandleMessage(int place);
  void Check(int place, const Hello& hello);
  void Connect(int place, const Hello& hello, FileDescriptor memory);
  Hello HelloTo(int place) const;
  bool IsReached(int place) const {
    return place != group_.own() && peers_.count(group_.process_ids()[place]) != 0;
  }
  bool IsWaited(int place) const {
    return IsReached(place) && stages_[place] != Stage::kConnected;
  }
  // The process there is gone without a word, as far as one has been heard.
  void MarkLost(int place, const std::string& how);
  void BroadcastFailure(MessageKind kind, const std::string& text);
  [[noreturn]] void Fail(const std::string& text) const;
  [[noreturn]] void FailExpired(double timeout_s) const;

  const Endpoint& endpoint_;
  const ProcessGroup& group_;
  const std::map<int, PeerAddress>& peers_;
  const std::string setup_;
  const FileDescriptor& memory_;
  const Take take_;
  std::vector<Stage> stages_;                   // [place]
  std::vector<ConnectedPeer> connected_peers_;  // [place]
  std::vector<FileDescriptor> unidentified_;    // accepted, have said nothing yet
  std::string loss_;                            // of the first that was lost
  int num_refused_ = 0;
};

}  // namespace jax_ub
