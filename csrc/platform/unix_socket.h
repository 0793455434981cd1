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

// Returns a socket that listens at `name`, in the abstract namespace (not a file).
FileDescriptor ListenAt(const std::string& name);

// Accepts a connection. Returns an empty handle if none is pending.
FileDescriptor Accept(const FileDescriptor& listener);

enum class DialResult {
  kConnected,
  kBusy,       // try again later
  kNoProcess,  // no process listens at this name
};
// Connects to the listener at `name`, without blocking. If the result is kConnected,
// sets `connection`.
DialResult Dial(const std::string& name, FileDescriptor* connection);

// The process and the user at the other end of a connection. On the side that connects,
// this is the process that called ListenAt.
struct Credentials {
  pid_t pid = 0;  // 0: not visible from this PID namespace
  uid_t uid = 0;
};
Credentials PeerCredentials(const FileDescriptor& connection);

enum class Sent {
  kYes,
  kFull,  // the peer must read first, or the kernel lacks memory: send again later
  kNo,    // the peer is lost
};
// Sends a message without blocking. If `passed` is not null, the message carries this
// descriptor.
Sent Send(const FileDescriptor& connection,
          std::span<const std::byte> message,
          const FileDescriptor* passed = nullptr) noexcept;

enum class Arrival {
  kMessage,
  kNothing,
  kEnd,  // the peer closed its end or exited
};
struct Received {
  Arrival arrival = Arrival::kNothing;
  size_t size = 0;        // bytes stored in the buffer; a longer message is truncated
  FileDescriptor passed;  // empty if the message carried no descriptor
};
// Receives a message into `buffer`. Does not wait: if no message is pending, returns
// kNothing.
Received Receive(const FileDescriptor& connection, std::span<std::byte> buffer);

}  // namespace jax_ub
