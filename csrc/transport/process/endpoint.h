// The address at which a process accepts connections from the other processes of a
// group.
#pragma once

#include "platform/file_descriptor.h"
#include "transport/process/process_group.h"

namespace jax_ub {

// A listening Unix socket. Its random name is in the abstract namespace, so no file is
// left behind. It accepts processes of the same user that send the token.
class Endpoint {
 public:
  Endpoint();

  const PeerAddress& address() const { return address_; }
  const FileDescriptor& listener() const { return listener_; }

 private:
  PeerAddress address_;
  FileDescriptor listener_;
};

}  // namespace jax_ub
