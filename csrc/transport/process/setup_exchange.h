// All-gathers messages between the processes of a group while they set up a
// communicator. Uses the connections of the handshake, before PeerConnections watches
// them.
#pragma once

#include <string>
#include <vector>

#include "platform/deadline.h"
#include "platform/file_descriptor.h"
#include "transport/process/handshake.h"
#include "transport/process/process_group.h"

namespace jax_ub {

struct SetupMessage {
  std::string text;                    // up to 8 KiB
  std::vector<FileDescriptor> passed;  // descriptors to pass to the peers
};

class SetupExchange {
 public:
  // `connected_peers` is indexed by process index; processes without a connection do
  // not take part. Both arguments must outlive the object.
  SetupExchange(const ProcessGroup& group, std::vector<ConnectedPeer>& connected_peers);

  // Sends `own` to all connected peers and returns the messages of all processes,
  // indexed by process index. The result includes `own`, and an empty message for each
  // process that is not connected. All processes must make the same number of calls.
  // Throws a failed peer's reason, CommunicatorError if a peer dies or closes, and
  // DeadlineError.
  std::vector<SetupMessage> Exchange(SetupMessage own, const Deadline& deadline);

  // Sends a failure to all connected peers, so that they do not wait for this process.
  void BroadcastFailure(const std::exception_ptr& reason) const;

 private:
  // The value of `num_missing` until the setup message itself has arrived. Afterwards
  // it is the number of descriptors that are still missing.
  static constexpr int kMissing = -1;

  void Send(int process_index, const SetupMessage& setup) const;
  bool IsReached(int process_index) const;
  // Reads what has arrived from a peer, up to the end of one message.
  void Receive(int process_index, SetupMessage& setup, int& num_missing);
  void Take(int process_index,
            Message message,
            SetupMessage& setup,
            int& num_missing) const;
  [[noreturn]] void Fail(const std::string& text) const;

  const ProcessGroup& group_;
  std::vector<ConnectedPeer>& connected_peers_;
};

}  // namespace jax_ub
