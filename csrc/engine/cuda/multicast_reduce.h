// GEMM+AR and all-reduce by multicast, used instead of a schedule. Each rank stores its
// partial sums in its own slots. Then each rank sums one part (share) of the rows for
// all ranks, in the NVLink switch.
//
//   rank r, for each split of the rows; slots are those of the schedule's two stages
//     GEMM               into own slots, all rows of the split
//     signal, wait       all peers: their partial sums are stored
//     sum                share r: multimem load, add bias and residual, multimem store
//     signal, wait       all peers: their shares are stored
//     copy               own slots to the result
//
// The rank that owns a share adds bias and residual to it, so all ranks get the same
// bits. The switch rounds 16-bit sums; they are rounded again if something is added.
//
// As in a schedule, a rank signals a peer only after the peer has completed its
// previous call. In that call, another rank may have used the same flag of the peer,
// and its late signal would overwrite this one. Before a rank writes to its own slots,
// it waits for nothing: the previous call that used them has waited until the peers had
// accessed them.
#pragma once

#include <cstdint>
#include <functional>

#include "engine/call.h"
#include "engine/device.h"
#include "engine/executor.h"
#include "transport/cuda/cuda_slots.h"
#include "transport/transport.h"

namespace jax_ub {

// Returns whether a call is reduced by multicast if its slots have a multicast address.
// The result is the same on all ranks. `plan` is the slot plan of the call's schedule.
bool ReducesByMulticast(const CallAttributes& attributes,
                        const RankCall& call,
                        const SlotRequirements& plan);

// Executes the rank's part of the call. `sum` is CudaSlots::SumByMulticast, or does
// nothing in a dry run.
void ReduceByMulticast(const CallAttributes& attributes,
                       const RankCall& call,
                       const SlotRequirements& plan,
                       double timeout_s,
                       const std::function<void(const MulticastRange&)>& sum,
                       Transport& transport,
                       Device& device);

}  // namespace jax_ub
