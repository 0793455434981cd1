// Checks and converts the arguments of `connect`, for both Python modules.
#pragma once

#include <nanobind/nanobind.h>

#include <cstddef>
#include <cstdint>
#include <map>
#include <string>

#include "transport/process/process_group.h"

namespace jax_ub {

// Throws ValueError unless both counts are positive and equal, one item per rank.
inline void CheckOneOfEach(size_t num_devices,
                           size_t num_others,
                           const std::string& others) {
  if (num_devices > 0 && num_devices == num_others) return;
  throw nanobind::value_error((std::to_string(num_devices) + " devices and " +
                               std::to_string(num_others) + " " + others +
                               ": expected one of each for every rank")
                                  .c_str());
}

// Returns the addresses and tokens of the peers, keyed by process number. Throws
// ValueError if an address has no token.
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
