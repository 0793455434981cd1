// Memory into which one worker thread packs operands. It grows on demand, is reused for
// every unit, and is never shared between threads.
#pragma once

#include <cstddef>

#include "platform/mapping.h"

namespace jax_ub {

class Scratch {
 public:
  // Returns at least `size_bytes` of memory, aligned to 4096 bytes. Invalidates the
  // memory that earlier calls returned.
  std::byte* Reserve(size_t size_bytes);
  size_t size_bytes() const { return memory_.get().size; }

 private:
  HostMapping memory_;
};

}  // namespace jax_ub
