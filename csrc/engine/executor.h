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
bool IsLocalCall(const CallAttributes& attributes);

// False for those, and for the method direct.
bool UsesSlots(const CallAttributes& attributes);

// Takes the rank's part in the call, from a thread that may wait where the transport
// waits. On a device that does everything at once the products of bulk ops are left out:
// the caller runs them beside.
void ExecuteRank(const CallAttributes& attributes,
                 const RankCall& call,
                 const SlotRequirements& plan,
                 double timeout_s,
                 Transport& transport,
                 Device& device,
                 const TraceContext& trace);

// The products of a call that communicates nothing.
void ExecuteLocal(const CallAttributes& attributes,
                  const RankCall& call,
                  Device& device);

}  // namespace jax_ub
