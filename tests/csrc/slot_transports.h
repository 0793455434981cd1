// A connection with both ends in this process.
#pragma once

#include <string>
#include <vector>

#include "check.h"
#include "platform/deadline.h"
#include "platform/file_descriptor.h"
#include "platform/unix_socket.h"
#include "transport/process/message.h"

namespace jax_ub {

struct Ends {
  Ends() {
    const std::string name = "jax_ub-test-" + std::to_string(RandomBits());
    const FileDescriptor listener = ListenAt(name);
    CHECK(Dial(name, &one) == DialResult::kConnected);
    other = Accept(listener);
  }
  FileDescriptor one, other;
};

// Returns the next message; its arrival is kNothing if none comes.
inline Message Await(const FileDescriptor& connection) {
  std::vector<pollfd> polled = {{connection.get(), POLLIN, 0}};
  if (!Poll(polled, Deadline::After(20).time())) return {};
  return ReceiveMessage(connection);
}

}  // namespace jax_ub
