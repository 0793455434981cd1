// From XLA's view of a call to the engine's.
#pragma once

#include "engine/call.h"
#include "xla/ffi/api/ffi.h"

namespace jax_ub {

// Throws std::invalid_argument that names the attribute.
Attributes DecodeAttributes(Op op, const xla::ffi::Dictionary& dict);

// The device that runs the call, as the attributes know it; `ordinal` is XLA's. Throws
// ShapeError where the number of the partition is missing, or out of range.
int64_t DeviceOf(const Attributes& attributes,
                 const xla::ffi::RemainingArgs& operands,
                 int32_t ordinal);

// Throws ShapeError for a dtype that no op has. The last `num_workspaces` results are
// not the op's, nor is the number of the partition.
RankCall DecodeCall(const Attributes& attributes,
                    const xla::ffi::RemainingArgs& operands,
                    const xla::ffi::RemainingRets& results,
                    size_t num_workspaces = 0);

}  // namespace jax_ub
