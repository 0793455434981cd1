// Messages, with a descriptor where one is to be passed on, between processes of one
// host. Sockets keep message boundaries, never block, and have names that are no files.
#pragma once

#include <sys/types.h>

#include <cstddef>
#include <span>
#include <string>

#include "platform/file_descriptor.h"

namespace jax_ub {

// Accepts connections under a name in the abstract namespace.
FileDescriptor ListenAt(const std::string& name);

// No connection is waiting: none.
FileDescriptor Accept(const FileDescriptor& listener);

enum class DialResult {
  kConnected,
  kBusy,
  kNoProcess
};  // kNoProcess: nobody listens there
DialResult Dial(const std::string& name, FileDescriptor* connection);

// Of the process that connected, or that began to listen.
struct Credentials {
  pid_t pid = 0;  // 0: not visible from here
  uid_t uid = 0;
};
Credentials PeerCredentials(const FileDescriptor& connection);

enum class Sent { kYes, kFull, kNo };  // kFull: until the peer reads; kNo: it is gone
Sent Send(const FileDescriptor& connection,
          std::span<const std::byte> message,
          const FileDescriptor* passed = nullptr) noexcept;

enum class Arrival { kMessage, kNothing, kEnd };  // kEnd: the peer is gone
struct Received {
  Arrival arrival = Arrival::kNothing;
  size_t size = 0;        // of the message; what exceeds the buffer is lost
  FileDescriptor passed;  // if one came
};
Received Receive(const FileDescriptor& connection, std::span<std::byte> buffer);

}  // namespace jax_ub
