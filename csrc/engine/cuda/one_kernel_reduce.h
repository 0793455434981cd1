// Executes a GEMM + all-reduce, or a plain all-reduce, of few rows by one kernel
// instead of the schedule `one_shot`. After the GEMM, the kernel exchanges the partial
// sums of all rows and adds them (transport/cuda/all_reduce_params.h). The result is
// bitwise equal to that of the schedule.
#pragma once

#include "engine/call.h"
#include "engine/device.h"
#include "engine/slot_plans.h"
#include "transport/cuda/cuda_slots.h"

namespace jax_ub {

// Returns whether a single kernel reduces the call. `plan` has the slots of the call.
bool ReducesInOneKernel(const CallAttributes& attributes, const SlotRequirements& plan);

// Enqueues the rank's part of the call: its GEMM, if any, and the kernel that adds the
// partial sums of all ranks. `device` must have the workspace of the call's schedule.
void ReduceInOneKernel(const CallAttributes& attributes,
                       const RankCall& call,
                       const SlotRequirements& plan,
                       double timeout_s,
                       CudaSlots& slots,
                       Device& device);

}  // namespace jax_ub
