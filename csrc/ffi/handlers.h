// The FFI targets of the CPU engine, and the engine that their handlers use.
#pragma once

#include <array>

#include "engine/call.h"
#include "engine/cpu/engine.h"
#include "ffi/target.h"

namespace jax_ub {

// Returns the FFI targets, indexed by Op.
std::array<Target, kNumOps> Targets();

// Returns the type of the state of an instantiated call.
CallSiteType TheCallSiteType();

// Returns the engine that all handlers of this process share, and creates it at the
// first call. It is global because handlers are plain functions. A child of fork() gets
// a new engine, since a child does not inherit threads.
Engine& ProcessEngine();
// Returns the same engine, or nullptr if it does not exist yet. For queries and
// releases, which should not create an engine, since that starts a thread.
Engine* ExistingEngine();

}  // namespace jax_ub
