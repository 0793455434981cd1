// Unix domain sockets between processes of one host. A message may carry a file
// descriptor. Sockets preserve message boundaries (SOCK_SEQPACKET), never block, and
// are bound to names in the abstract namespace, which are not files.
#pragma once

#include <sys/types.h>

#include <cstddef>
#include <span>
#include <string>

#include "platform/file_descriptor.h"

namespace jax_ub {

// Listens for connections at a name in the abstract namespace.
FileDescriptor ListenAt(const std::string& name);

// Accepts a pending connection. Returns an empty handle if there is none.
FileDescriptor Accept(const FileDescriptor& listener);

enum class DialResult {
  kConnected,
  kBusy,
  kNoProcess
};  // kBusy: try again later; kNoProcess: no process listens at this name
// Connects to the listener at `name`. Sets `connection` if the result is kConnected.
DialResult Dial(const std::string& name, FileDescriptor* connection);

// Process and user at the other end of a connection: the process that connected, or the
// process that called ListenAt.
struct Credentials {
  pid_t pid = 0;  // 0: not visible from this PID namespace
  uid_t uid = 0;
};
Credentials PeerCredentials(const FileDescriptor& connection);

enum class Sent {
  kYes,
  kFull,
  kNo
};  // kFull: the peer must read first; kNo: it is lost
// Sends a message, and the descriptor `passed` with it unless it is null.
Sent Send(const FileDescriptor& connection,
          std::span<const std::byte> message,
          const FileDescriptor* passed = nullptr) noexcept;

enum class Arrival {
  kMessage,
  kNothing,
  kEnd
};  // kEnd: the peer closed its end or exited
struct Received {
  Arrival arrival = Arrival::kNothing;
  size_t size = 0;        // bytes stored in the buffer; a longer message is truncated
  FileDescriptor passed;  // empty if the message carried no descriptor
};
// Receives the next message into `buffer`, without waiting.
Received Receive(const FileDescriptor& connection, std::span<std::byte> buffer);

}  // namespace jax_ub
