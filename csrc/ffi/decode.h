// Converts XLA's buffers and attributes to the engine's types, and the engine's
// exceptions to XLA's errors.
#pragma once

#include <exception>
#include <string>

#include "engine/call.h"
#include "xla/ffi/api/ffi.h"

namespace jax_ub {

// Converts XLA's element type to a dtype. Throws ShapeError, which names the call
// `label`, if the dtype is not supported.
DType DecodeDType(const std::string& label, xla::ffi::DataType type);

// Reads the attributes of `op`. Throws std::invalid_argument, which names the
// attribute, if an attribute is missing or out of range.
CallAttributes DecodeAttributes(Op op, const xla::ffi::Dictionary& dict);

// Converts XLA's buffers to the operands and results of the op. The last
// `num_workspaces` results of the custom call are workspaces, not results of the op.
// Throws ShapeError if a dtype is not supported by any op, or if an exported program
// has no operand for the partition id.
RankCall DecodeCall(const CallAttributes& attributes,
                    const xla::ffi::RemainingArgs& operands,
                    const xla::ffi::RemainingRets& results,
                    size_t num_workspaces = 0);

// Returns the id of the device that runs a call on the CPU. The id is XLA's `ordinal`.
// In an exported program, it is the device that the attributes assign to the partition
// id instead. Throws ShapeError if the partition id is out of range.
int64_t DeviceOf(const CallAttributes& attributes,
                 const RankCall& call,
                 int32_t ordinal);

// Converts an exception to an XLA error with the same message. Each exception type of
// platform/error.h has its own error code.
xla::ffi::Error ToFfiError(const std::exception_ptr& failure) noexcept;

// Ends a custom call: with the error `failure`, or successfully if it is null.
void Settle(xla::ffi::Promise promise, const std::exception_ptr& failure);

}  // namespace jax_ub
