// Converts XLA's representation of a call to the engine's, and the engine's exceptions
// to XLA's errors.
#pragma once

#include <exception>

#include "engine/call.h"
#include "xla/ffi/api/ffi.h"

namespace jax_ub {

// Reads the attributes of `op`. Throws std::invalid_argument, with the name of the
// attribute, if one is missing or out of range.
CallAttributes DecodeAttributes(Op op, const xla::ffi::Dictionary& dict);

// Converts XLA's buffers to the operands and results of the op. The last
// `num_workspaces` results of the custom call are not results of the op, but its
// workspace. Throws ShapeError if no op supports a dtype, or if an exported program has
// no operand for the partition id.
RankCall DecodeCall(const CallAttributes& attributes,
                    const xla::ffi::RemainingArgs& operands,
                    const xla::ffi::RemainingRets& results,
                    size_t num_workspaces = 0);

// Returns the id of the device that runs a call on the CPU. This is XLA's `ordinal` or,
// in an exported program, the device that belongs to the partition id. Throws
// ShapeError if the partition id is out of range.
int64_t DeviceOf(const CallAttributes& attributes,
                 const RankCall& call,
                 int32_t ordinal);

// Converts an exception to an XLA error with the same message. Each exception type of
// platform/error.h has its own error code.
xla::ffi::Error ToFfiError(const std::exception_ptr& failure) noexcept;

}  // namespace jax_ub
