// What both Python modules are told of the ranks that connect.
#pragma once

#include <nanobind/nanobind.h>

#include <cstddef>
#include <cstdint>
#include <map>
#include <string>

#include "transport/process/process_group.h"

namespace jax_ub {

// Throws ValueError unless each rank has a device and one of the `others`.
inline void CheckOneOfEach(size_t num_devices,
                           size_t num_others,
                           const std::string& others) {
  if (num_devices > 0 && num_devices == num_others) return;
  throw nanobind::value_error((std::to_string(num_devices) + " devices and " +
                               std::to_string(num_others) + " " + others +
                               ": expected one of each for every rank")
                                  .c_str());
}

// By process number. Throws ValueError for an address without a token.
inline std::map<int, PeerAddress> PeersOf(const std::map<int, std::string>& addresses,
                                          const std::map<int, uint64_t>& tokens) {
  std::map<int, PeerAddress> peers;
  for (const auto& [process, address] : addresses) {
    const auto token = tokens.find(process);
    if (token == tokens.end()) {
      throw nanobind::value_error(
          ("no token of process " + std::to_string(process)).c_str());
    }
    peers[process] = {address, token->second};
  }
  return peers;
}

}  // namespace jax_ub
