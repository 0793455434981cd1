// Functions that both Python modules use. They convert FFI handlers and numbers of
// calls to Python objects, and check arguments.
#pragma once

#include <nanobind/nanobind.h>

#include <array>
#include <cstddef>
#include <cstdint>
#include <map>
#include <string>

#include "ffi/target.h"
#include "transport/process/process_group.h"

namespace jax_ub {

// Returns the handlers of all targets, by target and stage:
// {"jax_ub$all_gather_matmul": {"instantiate": capsule, ...}, ...}.
template <typename Targets>
nanobind::dict HandlersOf(const Targets& targets) {
  nanobind::dict handlers;
  for (const Target& target : targets) {
    nanobind::dict stages;
    const auto add = [&](const char* stage, void* handler) {
      if (handler != nullptr) stages[stage] = nanobind::capsule(handler);
    };
    add("instantiate", target.instantiate);
    add("initialize", target.initialize);
    add("execute", target.execute);
    handlers[target.name.c_str()] = stages;
  }
  return handlers;
}

inline nanobind::dict TypeOf(const CallSiteType& type) {
  nanobind::dict dict;
  dict["type_id"] = nanobind::capsule(type.type_id);
  dict["type_info"] = nanobind::capsule(type.type_info);
  return dict;
}

// Returns `timeout_s`, which comes from Python. Throws ValueError unless it is
// positive.
inline double CheckedTimeout(double timeout_s) {
  if (timeout_s > 0) return timeout_s;
  throw nanobind::value_error(
      ("timeout_s is " + std::to_string(timeout_s) + ", expected more than 0").c_str());
}

// Converts `num_calls`, the number of calls of each op, to a dictionary from the op's
// name to the number. `num_calls` is indexed by Op.
inline nanobind::dict CallsByName(const std::array<int64_t, kNumOps>& num_calls) {
  nanobind::dict calls;
  for (const OpInfo& info : kOps) {
    calls[std::string(info.name).c_str()] = num_calls[static_cast<int>(info.op)];
  }
  return calls;
}

// Throws ValueError unless `num_devices` and `num_others` are equal and positive. Each
// rank needs one device and one of the other items, which `others` names in the error.
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
