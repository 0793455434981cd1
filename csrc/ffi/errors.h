// Converts exceptions of the engine to XLA errors.
#pragma once

#include <exception>

#include "xla/ffi/api/ffi.h"

namespace jax_ub {

// Maps each exception type of platform/error.h to an XLA error code and keeps its
// message.
xla::ffi::Error ToFfiError(const std::exception_ptr& failure) noexcept;

}  // namespace jax_ub
