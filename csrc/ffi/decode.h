// From XLA's view of a call to the engine's.
#pragma once

#include "engine/call.h"
#include "xla/ffi/api/ffi.h"

namespace jax_ub {

// Throws std::invalid_argument that names the attribute.
CallAttributes DecodeAttributes(Op op, const xla::ffi::Dictionary& dict);

// Throws ShapeError for a dtype that no op has, and where the number of the partition is
// missing. The last `num_workspaces` results are not the op's.
RankCall DecodeCall(const CallAttributes& attributes,
                    const xla::ffi::RemainingArgs& operands,
                    const xla::ffi::RemainingRets& results,
                    size_t num_workspaces = 0);

// The device that a call on a CPU stands for, as the attributes know it; `ordinal` is
// XLA's. Throws ShapeError where the number of the partition is out of range.
int64_t DeviceOf(const CallAttributes& attributes,
                 const RankCall& call,
                 int32_t ordinal);

}  // namespace jax_ub
