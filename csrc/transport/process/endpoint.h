// Where a process is found by the others of its group.
#pragma once

#include "platform/file_descriptor.h"
#include "transport/process/process_group.h"

namespace jax_ub {

// A listening socket in the abstract namespace, under a random name: no file. Whoever
// connects must be of the same user and know the token.
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
