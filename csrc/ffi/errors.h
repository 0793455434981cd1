// What the engine throws, as XLA reports it.
#pragma once

#include <exception>

#include "xla/ffi/api/ffi.h"

namespace jax_ub {

// The only place that knows both kinds of errors.
xla::ffi::Error ToFfiError(const std::exception_ptr& failure) noexcept;

}  // namespace jax_ub
