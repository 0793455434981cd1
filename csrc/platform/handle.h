// A move-only owner of an operating system resource, such as a file descriptor.
#pragma once

#include <utility>

namespace jax_ub {

// Owns one value of type Traits::Value. `Traits` also defines the constant kNone, for
// an empty handle, and the function `static void Close(Value) noexcept`.
template <typename Traits>
class UniqueHandle {
 public:
  using Value = typename Traits::Value;

  UniqueHandle() = default;
  explicit UniqueHandle(Value value) : value_(value) {}
  ~UniqueHandle() { reset(); }
  UniqueHandle(UniqueHandle&& other) noexcept : value_(other.release()) {}
  UniqueHandle& operator=(UniqueHandle&& other) noexcept {
    if (this != &other) {
      reset();
      value_ = other.release();
    }
    return *this;
  }

  const Value& get() const { return value_; }
  explicit operator bool() const { return !(value_ == Traits::kNone); }
  Value release() { return std::exchange(value_, Traits::kNone); }
  void reset() {
    if (*this) Traits::Close(release());
  }

 private:
  Value value_ = Traits::kNone;
};

}  // namespace jax_ub
