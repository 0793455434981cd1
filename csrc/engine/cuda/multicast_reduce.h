// GEMM+AR and all-reduce by multicast, in place of their schedules: each rank leaves its
// partial sums in its own slots, and has the switch add a share of them for all.
//
//   rank r, for each piece of the rows; slots are those of the schedule's two stages
//     product            own slots, all rows of the piece
//     signal, wait       by all peers: their partial sums are there
//     sum                share r: loaded from all ranks at once, addends, stored at all
//     signal, wait       by all peers: their shares are there
//     copy               own slots to the result
//
// The rank that owns a share adds bias and residual to it, so that all ranks get the same
// bits. Sums of 16 bits are rounded by the switch, and once more where something is added.
//
// A peer is signalled when it has ended its previous call, as by a schedule: its flags may
// have been another rank's there, whose signal would come behind this one and undo it. The
// own slots need no such wait: all that peers put there, or read by their sums, was waited
// for in the call that did it.
#pragma once

#include <cstdint>
#include <functional>

#include "engine/call.h"
#include "engine/device.h"
#include "engine/executor.h"
#include "transport/cuda/cuda_slots.h"
#include "transport/transport.h"

namespace jax_ub {

// Whether a call runs so where its slots have a multicast address; the same on all ranks.
// `plan` is that of its schedule.
bool ReducesByMulticast(const CallAttributes& attributes,
                        const RankCall& call,
                        const SlotRequirements& plan);

// Takes the rank's part. `sum` is CudaSlots::SumByMulticast, or nothing to measure.
void ReduceByMulticast(const CallAttributes& attributes,
                       const RankCall& call,
                       const SlotRequirements& plan,
                       double timeout_s,
                       const std::function<void(const MulticastRange&)>& sum,
                       Transport& transport,
                       Device& device);

}  // namespace jax_ub
