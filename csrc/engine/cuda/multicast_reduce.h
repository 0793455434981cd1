// Executes a GEMM + all-reduce, or a plain all-reduce, by NVLink multicast instead of a
// schedule. Each rank stores its partial sums in its own slots (receive buffers). Then
// each rank sums one part of the rows for all ranks, in the NVLink switch. For each
// split of the rows, a rank executes:
//
//   GEMM               partial sums of all rows of the split, into the rank's slots
//   signal, wait       until all peers have stored their partial sums
//   sum                part r, on rank r: multimem load, add bias and residual,
//                      multimem store to all ranks
//   signal, wait       until all peers have stored their parts
//   copy               from the rank's slots to the result
//
// All ranks get the same bits, because one rank computes each part. The switch rounds
// 16-bit sums; they are rounded again if bias or residual is added.
#pragma once

#include <cstdint>
#include <functional>

#include "engine/call.h"
#include "engine/device.h"
#include "engine/executor.h"
#include "transport/cuda/cuda_slots.h"
#include "transport/transport.h"

namespace jax_ub {

// Returns whether multicast reduces the call, provided that its slots have a multicast
// address. The result is equal on all ranks. `plan` has the slots of the call's
// schedule.
bool ReducesByMulticast(const CallAttributes& attributes,
                        const RankCall& call,
                        const SlotRequirements& plan);

// Executes the call on one rank. Computes the partial sums, reduces them over all ranks
// by multicast, and copies them to the result. `sum` reduces a range of the slots: it
// is CudaSlots::SumByMulticast, or does nothing in a dry run.
void ReduceByMulticast(const CallAttributes& attributes,
                       const RankCall& call,
                       const SlotRequirements& plan,
                       double timeout_s,
                       const std::function<void(const MulticastRange&)>& sum,
                       Transport& transport,
                       Device& device);

}  // namespace jax_ub
