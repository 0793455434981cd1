// Exports the FFI handlers of an engine to Python, for both Python modules.
#pragma once

#include <nanobind/nanobind.h>

#include <string>

#include "ffi/target.h"

namespace jax_ub {

// Returns {"jax_ub$all_gather_matmul": {"instantiate": capsule, ...}, ...}, with all
// targets and stages.
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

// Returns `timeout_s`, a timeout that Python passes. Throws ValueError unless it is
// positive.
inline double CheckedTimeout(double timeout_s) {
  if (timeout_s > 0) return timeout_s;
  throw nanobind::value_error(
      ("timeout_s is " + std::to_string(timeout_s) + ", expected more than 0").c_str());
}

}  // namespace jax_ub
