// What XLA is told of an engine: its handlers, and the type of their state. No XLA
// header is needed to pass it on.
#pragma once

#include <array>
#include <string>
#include <utility>

#include "engine/call.h"

namespace jax_ub {

// Handlers as untyped pointers: what a PyCapsule holds. Stages that a platform does not
// run are null.
struct Target {
  std::string name;  // "jax_ub$all_gather_matmul"
  void* instantiate = nullptr;
  void* initialize = nullptr;
  void* execute = nullptr;
};

// What `make.operator()<op>()` returns, of every op in their order.
template <typename Make>
std::array<Target, kNumOps> TargetsOfOps(const Make& make) {
  return [&]<int... op>(std::integer_sequence<int, op...>) {
    return std::array{make.template operator()<static_cast<Op>(op)>()...};
  }(std::make_integer_sequence<int, kNumOps>());
}

// The state that an instantiated call has. To be registered under `name` before any
// target, and after XLA's backend exists: older jaxlibs take queued targets first.
struct CallSiteType {
  std::string name;  // "jax_ub$CallSite"
  void* type_id = nullptr;
  void* type_info = nullptr;
};

// Of the XLA headers that the handlers were compiled with.
std::pair<int, int> XlaFfiApiVersion();

}  // namespace jax_ub
