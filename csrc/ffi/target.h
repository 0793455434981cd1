// The FFI handlers of an engine and the type of their state, as they are registered
// with XLA. This header does not include XLA's headers.
#pragma once

#include <array>
#include <string>
#include <utility>

#include "engine/call.h"

namespace jax_ub {

// One FFI target. Its handlers are untyped pointers, which Python gets as PyCapsules.
// The pointer is null for a stage that the platform does not use.
struct Target {
  std::string name;  // "jax_ub$all_gather_matmul"
  void* instantiate = nullptr;
  void* initialize = nullptr;
  void* execute = nullptr;
};

// Calls `make.operator()<op>()`, which returns the target of an op, for each op.
// Returns the targets indexed by Op.
template <typename Make>
std::array<Target, kNumOps> TargetsOfOps(const Make& make) {
  return [&]<int... op>(std::integer_sequence<int, op...>) {
    return std::array{make.template operator()<static_cast<Op>(op)>()...};
  }(std::make_integer_sequence<int, kNumOps>());
}

// The FFI type of the state that XLA keeps for each custom call. It must be registered
// under `name` before any target. It must also be registered after the backend exists:
// earlier registrations are queued, and older jaxlibs register queued targets before
// queued types.
struct CallSiteType {
  std::string name;  // "jax_ub$CallSite"
  void* type_id = nullptr;
  void* type_info = nullptr;
};

// Returns the version (major, minor) of XLA's FFI headers with which the handlers were
// compiled.
std::pair<int, int> XlaFfiApiVersion();

}  // namespace jax_ub
