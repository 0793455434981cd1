// Memory that a worker thread packs operands into; grows, is reused, never shared.
#pragma once

#include <cstddef>

namespace jax_ub {

class Scratch {
 public:
  Scratch() = default;
  Scratch(const Scratch&) = delete;
  Scratch& operator=(const Scratch&) = delete;
  ~Scratch();

  // At least `size_bytes`, aligned to 4096. What an earlier call returned is invalid.
  std::byte* Reserve(size_t size_bytes);
  size_t size_bytes() const { return size_bytes_; }

 private:
  std::byte* data_ = nullptr;
  size_t size_bytes_ = 0;
};

}  // namespace jax_ub
