// The FFI targets of the CPU engine, for whoever registers them with XLA.
#pragma once

#include <array>
#include <string>
#include <utility>

#include "engine/call.h"
#include "engine/engine.h"

namespace jax_ub {

// Handlers as untyped pointers: what a PyCapsule holds.
struct Target {
  std::string name;  // "jax_ub$all_gather_matmul"
  void* instantiate = nullptr;
  void* execute = nullptr;
};

std::array<Target, kNumOps> Targets();

// The state that an instantiated call has. To be registered under `name` before any
// target, and after XLA's backend exists: older jaxlibs take queued targets first.
struct CallSiteType {
  std::string name;  // "jax_ub$CallSite"
  void* type_id = nullptr;
  void* type_info = nullptr;
};

CallSiteType TheCallSiteType();

// Of the XLA headers that the handlers were compiled with.
std::pair<int, int> XlaFfiApiVersion();

// The engine that all handlers of this process use: handlers are plain functions.
// A child of fork() gets a new one, since threads are not inherited.
Engine& ProcessEngine();

}  // namespace jax_ub
