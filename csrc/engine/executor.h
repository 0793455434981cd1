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

// Returns whether the call sends data through slots (receive buffers). Local calls and
// the method "direct" do not.
bool UsesSlots(const CallAttributes& attributes);

// Returns the slots (receive buffers) for which kWait or kWaitFree steps wait, each
// with its peer and chunk.
std::vector<PeerSlot> SlotsOf(std::span<const Step> steps);

// Executes the schedule of one rank: its communication and GEMMs. May block, because
// the transport may. On a device that does not enqueue, omits the GEMMs of bulk ops,
// which the caller runs concurrently.
void ExecuteRank(const CallAttributes& attributes,
                 const RankCall& call,
                 const SlotRequirements& plan,
                 double timeout_s,
                 Transport& transport,
                 Device& device,
                 const TraceContext& trace);

// Executes the GEMMs of a call without communication.
void ExecuteLocal(const CallAttributes& attributes,
                  const RankCall& call,
                  Device& device);

}  // namespace jax_ub
