// Exceptions of the engine. csrc/ffi maps each type to an XLA error code.
#pragma once

#include <exception>
#include <stdexcept>
#include <string>

namespace jax_ub {

class Error : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

// The shapes or dtypes of operands and results do not match, so the call is wrong.
class ShapeError : public Error {
 public:
  using Error::Error;
};

// The call is correct but not supported. For example, the op does not have this method,
// or the machine has no CUDA driver.
class UnsupportedError : public Error {
 public:
  using Error::Error;
};

// A collective call failed, because a rank failed, made a different call, or did not
// arrive.
class CommunicatorError : public Error {
 public:
  using Error::Error;
};

// A wait timed out. The message names the waiting rank, the missing ranks and the
// timeout.
class DeadlineError : public CommunicatorError {
 public:
  using CommunicatorError::CommunicatorError;
};

// A call of the operating system or of a driver failed. The message has the name of the
// called function and the reason.
class SystemError : public Error {
 public:
  using Error::Error;
};

// Returns the message of an exception, which must be derived from std::exception.
inline std::string TextOf(const std::exception_ptr& failure) {
  try {
    std::rethrow_exception(failure);
  } catch (const std::exception& error) {
    return error.what();
  }
}

}  // namespace jax_ub
