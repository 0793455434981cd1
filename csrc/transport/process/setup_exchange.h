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
  // `connected_peers` is indexed by process index. Processes without a connection do
  // not take part. Both references must outlive the object.
  SetupExchange(const ProcessGroup& group, std::vector<ConnectedPeer>& connected_peers);

  // Sends `own` to all connected peers, and returns the messages of all processes by
  // process index. The entry of this process is `own`, and the entries of processes
  // without a connection are empty. All processes must call this function equally
  // often. Throws the reason of a peer that failed, CommunicatorError if a peer dies or
  // closes, or DeadlineError.
  std::vector<SetupMessage> Exchange(SetupMessage own, const Deadline& deadline);

  // Sends a failure to all connected peers, which then stop waiting for this process.
  void BroadcastFailure(const std::exception_ptr& reason) const;

 private:
  // Value of `num_missing` before the setup message has arrived. From then on,
  // `num_missing` is the number of file descriptors that have not arrived yet.
  static constexpr int kMissing = -1;

  void Send(int process_index,
            const SetupMessage& setup,
            const Deadline& deadline) const;
  bool IsReached(int process_index) const;
  // Reads the messages that a peer has sent, until none is pending or one setup message
  // is complete.
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
