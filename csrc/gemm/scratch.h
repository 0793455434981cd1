// Memory into which one worker thread packs operands. It grows on demand, is reused for
// every unit, and is never shared between threads.
#pragma once

#include <cstddef>
#include <new>
#include <utility>

#include "platform/mapping.h"

namespace jax_ub {

class Scratch {
 public:
  // Returns memory of at least `size_bytes` bytes, aligned to 4096 bytes. Invalidates
  // memory that earlier calls have returned.
  std::byte* Reserve(size_t size_bytes) {
    if (size_bytes > this->size_bytes()) {
      const size_t rounded = (size_bytes + kHugePage - 1) / kHugePage * kHugePage;
      HostMapping fresh = MapPrivate(rounded, Pages::kHuge);
      if (!fresh) throw std::bad_alloc();
      memory_ = std::move(fresh);
    }
    return memory_.get().data;
  }
  size_t size_bytes() const { return memory_.get().size; }

 private:
  // Size of a huge page in bytes. The memory consists of huge pages, because with small
  // pages, the strides between packed panels would cause TLB misses.
  static constexpr size_t kHugePage = size_t{2} << 20;

  HostMapping memory_;
};

}  // namespace jax_ub
