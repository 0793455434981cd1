#include "ffi/errors.h"

#include <new>
#include <stdexcept>
#include <string>

#include "ffi/target.h"
#include "platform/error.h"

namespace jax_ub {

namespace ffi = xla::ffi;

ffi::Error ToFfiError(const std::exception_ptr& failure) noexcept try {
  try {
    std::rethrow_exception(failure);
  } catch (const DeadlineError& error) {
    return ffi::Error(ffi::ErrorCode::kDeadlineExceeded, error.what());
  } catch (const CommunicatorError& error) {
    return ffi::Error(ffi::ErrorCode::kAborted, error.what());
  } catch (const UnsupportedError& error) {
    return ffi::Error(ffi::ErrorCode::kUnimplemented, error.what());
  } catch (const ShapeError& error) {
    return ffi::Error::InvalidArgument(error.what());
  } catch (const std::invalid_argument& error) {
    return ffi::Error::InvalidArgument(error.what());
  } catch (const std::bad_alloc&) {
    return ffi::Error(ffi::ErrorCode::kResourceExhausted, "jax_ub: out of memory");
  } catch (const std::exception& error) {
    return ffi::Error::Internal(std::string("jax_ub: ") + error.what());
  } catch (...) {
    return ffi::Error::Internal("jax_ub: unknown exception");
  }
} catch (const std::bad_alloc&) {
  // The text is short enough for std::string's internal buffer, so it needs no memory.
  return ffi::Error(ffi::ErrorCode::kResourceExhausted, "out of memory");
}

std::pair<int, int> XlaFfiApiVersion() {
  return {XLA_FFI_API_MAJOR, XLA_FFI_API_MINOR};
}

}  // namespace jax_ub
