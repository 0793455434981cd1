// What is registered with XLA for an engine: its FFI handlers and the type of their
// state. This header does not need XLA's headers.
#pragma once

#include <array>
#include <string>
#include <utility>

#include "engine/call.h"

namespace jax_ub {

// One FFI target. Handlers are untyped pointers, for PyCapsules. A stage is null if the
// platform does not use it.
struct Target {
  std::string name;  // "jax_ub$all_gather_matmul"
  void* instantiate = nullptr;
  void* initialize = nullptr;
  void* execute = nullptr;
};

// Returns the results of `make.operator()<op>()` for all ops, indexed by Op.
template <typename Make>
std::array<Target, kNumOps> TargetsOfOps(const Make& make) {
  return [&]<int... op>(std::integer_sequence<int, op...>) {
    return std::array{make.template operator()<static_cast<Op>(op)>()...};
  }(std::make_integer_sequence<int, kNumOps>());
}

// The type of the state of an instantiated call. It must be registered under `name`
// before any target. The backend must exist by then, because older jaxlibs register
// queued targets before queued types.
struct CallSiteType {
  std::string name;  // "jax_ub$CallSite"
  void* type_id = nullptr;
  void* type_info = nullptr;
};

// Returns (major, minor) of the FFI API in the XLA headers that the handlers were
// compiled with.
std::pair<int, int> XlaFfiApiVersion();

}  // namespace jax_ub
