// Memory that a worker thread packs operands into; grows, is reused, never shared.
#pragma once

#include <cstddef>

#include "platform/mapping.h"

namespace jax_ub {

class Scratch {
 public:
  // At least `size_bytes`, aligned to 4096. What an earlier call returned is invalid.
  std::byte* Reserve(size_t size_bytes);
  size_t size_bytes() const { return memory_.get().size; }

 private:
  HostMapping memory_;
};

}  // namespace jax_ub
