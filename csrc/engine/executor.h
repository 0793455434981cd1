// Executes a rank's schedule on a transport and a device. Used by all methods except
// direct: they send data through slots.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "engine/call.h"
#include "engine/device.h"
#include "engine/slot_plans.h"
#include "engine/trace.h"
#include "schedule/schedule.h"
#include "transport/transport.h"

namespace jax_ub {

// Returns whether the call sends data through slots: false for local calls and for the
// method direct.
bool UsesSlots(const CallAttributes& attributes);

// Returns the slots of steps that wait.
std::vector<PeerSlot> SlotsOf(std::span<const Step> steps);

// Executes the rank's schedule. The calling thread must be allowed to block, because
// the transport may. On a device that does not enqueue, the GEMMs of bulk ops are
// skipped: the caller runs them concurrently.
void ExecuteRank(const CallAttributes& attributes,
                 const RankCall& call,
                 const SlotRequirements& plan,
                 double timeout_s,
                 Transport& transport,
                 Device& device,
                 const TraceContext& trace);

// Executes the GEMMs of a call that communicates nothing.
void ExecuteLocal(const CallAttributes& attributes,
                  const RankCall& call,
                  Device& device);

}  // namespace jax_ub
