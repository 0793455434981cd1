#include "transport/process/endpoint.h"

#include <string>

#include "platform/unix_socket.h"

namespace jax_ub {

namespace {

std::string RandomName() {
  return "jax_ub-" + std::to_string(RandomBits()) + "-" + std::to_string(RandomBits());
}

}  // namespace

Endpoint::Endpoint()
    : address_{.address = RandomName(), .token = RandomBits()},
      listener_(ListenAt(address_.address)) {}

}  // namespace jax_ub
