// What the engine throws. csrc/ffi maps each type to one XLA error code.
#pragma once

#include <stdexcept>
#include <string>

namespace jax_ub {

class Error : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

// The call is wrong: operands and results do not fit each other.
class ShapeError : public Error {
 public:
  using Error::Error;
};

// The call is right, but this op does not run by that method.
class UnsupportedError : public Error {
 public:
  using Error::Error;
};

// The ranks did not get together: one failed, disagreed with the others or never came.
class CommunicatorError : public Error {
 public:
  using Error::Error;
};

// A wait that reached its deadline. Its text says who waited for whom, and how long.
class DeadlineError : public CommunicatorError {
 public:
  using CommunicatorError::CommunicatorError;
};

// The operating system refused something: which call, and why.
class SystemError : public Error {
 public:
  using Error::Error;
};

}  // namespace jax_ub
