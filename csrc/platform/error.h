// Exceptions of the engine. csrc/ffi maps each type to an XLA error code.
#pragma once

#include <stdexcept>
#include <string>

namespace jax_ub {

class Error : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

// The call is invalid: the shapes or dtypes of operands and results are inconsistent.
class ShapeError : public Error {
 public:
  using Error::Error;
};

// The call is valid, but not supported: for example, the op does not have this method,
// or the machine has no CUDA driver.
class UnsupportedError : public Error {
 public:
  using Error::Error;
};

// A collective call failed because a rank failed, made a different call, or never
// arrived.
class CommunicatorError : public Error {
 public:
  using Error::Error;
};

// A wait timed out. The message names the waiting rank, the missing ranks, and the
// timeout.
class DeadlineError : public CommunicatorError {
 public:
  using CommunicatorError::CommunicatorError;
};

// A call to the operating system or to a driver failed. The message contains the
// function's name and the reason.
class SystemError : public Error {
 public:
  using Error::Error;
};

}  // namespace jax_ub
