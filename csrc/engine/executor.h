// Executes a rank's schedule on a transport and a device. All methods except "direct"
// use it, because they send data through slots (receive buffers).
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

// Returns the slots (receive buffers) for which kWait or kWaitFree steps wait, with the
// peer and the chunk of each slot.
std::vector<PeerSlot> SlotsOf(std::span<const Step> steps);

// Executes the schedule of one rank: its communication and GEMMs. May block, because
// the transport may block. On a device that does not enqueue work, the caller must run
// the GEMMs of bulk ops, concurrently with this function.
void ExecuteRank(const CallAttributes& attributes,
                 const RankCall& call,
                 const SlotRequirements& plan,
                 double timeout_s,
                 Transport& transport,
                 Device& device,
                 const TraceContext& trace);

// Executes the GEMMs of a call that does not communicate.
void ExecuteLocal(const CallAttributes& attributes,
                  const RankCall& call,
                  Device& device);

}  // namespace jax_ub
