// Runs a rank's schedule on a transport and a device: the methods that send pieces
// through slots.
#pragma once

#include <cstdint>

#include "engine/call.h"
#include "engine/device.h"
#include "engine/slot_plans.h"
#include "engine/trace.h"
#include "schedule/schedule.h"
#include "transport/transport.h"

namespace jax_ub {

// Whether nothing is communicated.
bool IsLocalCall(const Attributes& attributes);

// False for those, and for the method direct.
bool UsesSlots(const Attributes& attributes);

// Takes the rank's part in the call, from a thread that may wait where the transport
// waits. On a device that does everything at once the products of bulk ops are left out:
// the caller runs them beside.
void ExecuteRank(const Attributes& attributes,
                 const RankCall& call,
                 const SlotPlan& plan,
                 double timeout_s,
                 Transport& transport,
                 Device& device,
                 const TraceContext& trace);

// The products of a call that communicates nothing.
void ExecuteLocal(const Attributes& attributes, const RankCall& call, Device& device);

}  // namespace jax_ub
