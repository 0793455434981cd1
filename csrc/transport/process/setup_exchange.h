// What the processes of a group tell each other in turn, over the connections of a
// handshake, before Peers watches these.
#pragma once

#include <string>
#include <vector>

#include "platform/deadline.h"
#include "platform/file_descriptor.h"
#include "transport/process/handshake.h"
#include "transport/process/process_group.h"

namespace jax_ub {

struct SetupMessage {
  std::string text;  // up to 8 KiB
  std::vector<FileDescriptor> passed;
};

class SetupExchange {
 public:
  // `connected peers` [place]; those without a connection are left out. Both outlive it.
  SetupExchange(const ProcessGroup& group, std::vector<ConnectedPeer>& connected_peers);

  // Returns everybody's [place], the own one among them, empty for those left out. All
  // processes exchange equally often. Throws CommunicatorError, what a peer said if it
  // failed, and DeadlineError.
  std::vector<SetupMessage> Exchange(SetupMessage own, const Deadline& deadline);

  // To all connected peers, so that none waits for this process.
  void BroadcastFailure(const std::exception_ptr& reason) const;

 private:
  // In place of the number of descriptors that a note lacks: the note itself has not come.
  static constexpr int kMissing = -1;

  void Send(int place, const SetupMessage& note) const;
  bool IsReached(int place) const;
  // Takes what has come.
  void Hear(int place, SetupMessage& note, int& num_missing);
  void Take(int place, Message message, SetupMessage& note, int& num_missing) const;
  [[noreturn]] void Fail(const std::string& text) const;

  const ProcessGroup& group_;
  std::vector<ConnectedPeer>& connected_peers_;
};

}  // namespace jax_ub
