// The FFI targets of the CPU engine, and the engine that their handlers use.
#pragma once

#include <array>

#include "engine/call.h"
#include "engine/cpu/engine.h"
#include "ffi/target.h"

namespace jax_ub {

// Returns the FFI targets, indexed by Op.
std::array<Target, kNumOps> Targets();

// Returns the FFI targets that quantize arrays to FP8. They are no ops: they have no
// ranks, and the engine neither counts nor traces them.
std::array<Target, 2> QuantizeTargets();

// Returns the FFI type of the state that XLA keeps for each custom call.
CallSiteType TheCallSiteType();

// Returns the engine of this process, which all handlers share. Creates it at the first
// call. After a fork, the child gets a new engine, because it inherits no threads.
Engine& ProcessEngine();
// Returns the engine of this process, or nullptr if there is none. Used by queries and
// by functions that release memory, because these should not start the engine's
// threads.
Engine* ExistingEngine();

}  // namespace jax_ub
