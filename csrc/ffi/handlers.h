// The FFI targets of the CPU engine, for whoever registers them with XLA.
#pragma once

#include <array>

#include "engine/call.h"
#include "engine/cpu/engine.h"
#include "ffi/target.h"

namespace jax_ub {

std::array<Target, kNumOps> Targets();

CallSiteType TheCallSiteType();

// The engine that all handlers of this process use: handlers are plain functions.
// A child of fork() gets a new one, since threads are not inherited.
Engine& ProcessEngine();
// The same engine, or nullptr if nothing has needed one yet. Queries and releases use
// this: to make an engine starts a thread.
Engine* ExistingEngine();

}  // namespace jax_ub
