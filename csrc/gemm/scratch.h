// Memory into which one worker thread packs operands. It grows on demand, is reused for
// every unit, and is never shared between threads.
#pragma once

#include <cstddef>

#include "platform/mapping.h"

namespace jax_ub {

class Scratch {
 public:
  // Returns memory of at least `size_bytes` bytes, aligned to 4096 bytes. Invalidates
  // memory that earlier calls have returned.
  std::byte* Reserve(size_t size_bytes);
  size_t size_bytes() const { return memory_.get().size; }

 private:
  HostMapping memory_;
};

}  // namespace jax_ub
