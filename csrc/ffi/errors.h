// Converts exceptions of the engine to XLA errors.
#pragma once

#include <exception>

#include "xla/ffi/api/ffi.h"

namespace jax_ub {

// Converts an exception to an XLA error with the same message. Each exception type of
// platform/error.h has its own error code.
xla::ffi::Error ToFfiError(const std::exception_ptr& failure) noexcept;

}  // namespace jax_ub
