// GEMM+AR and all-reduce of few rows, used instead of the schedule `one_shot`: after
// the GEMM, one kernel exchanges the partial sums of all rows and adds them
// (transport/cuda/all_reduce_params.h). The result has the same bits.
#pragma once

#include "engine/call.h"
#include "engine/device.h"
#include "engine/slot_plans.h"
#include "transport/cuda/cuda_slots.h"

namespace jax_ub {

// Returns whether a single kernel reduces the call. `plan` has the call's slots.
bool ReducesInOneKernel(const CallAttributes& attributes, const SlotRequirements& plan);

// Enqueues the rank's part of the call: its GEMM, if any, and the kernel that adds the
// partial sums of all ranks. `device` has the workspace of the schedule.
void ReduceInOneKernel(const CallAttributes& attributes,
                       const RankCall& call,
                       const SlotRequirements& plan,
                       double timeout_s,
                       CudaSlots& slots,
                       Device& device);

}  // namespace jax_ub
