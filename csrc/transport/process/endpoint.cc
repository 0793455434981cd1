#include "transport/process/endpoint.h"

#include <cstdio>
#include <string>

#include "platform/unix_socket.h"

namespace jax_ub {

namespace {

std::string RandomName() {
  char text[48];
  std::snprintf(text, sizeof(text), "jax_ub-%016llx%016llx",
                static_cast<unsigned long long>(RandomBits()),
                static_cast<unsigned long long>(RandomBits()));
  return text;
}

}  // namespace

Endpoint::Endpoint()
    : address_{.address = RandomName(), .token = RandomBits()},
      listener_(ListenAt(address_.address)) {}

}  // namespace jax_ub
