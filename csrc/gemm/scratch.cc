#include "gemm/scratch.h"

#include <new>
#include <utility>

namespace jax_ub {

namespace {

// Size of a huge page. With small pages, the strides between packed panels would cause
// TLB misses.
constexpr size_t kHugePage = size_t{2} << 20;

}  // namespace

std::byte* Scratch::Reserve(size_t size_bytes) {
  if (size_bytes > memory_.get().size) {
    const size_t rounded = (size_bytes + kHugePage - 1) / kHugePage * kHugePage;
    HostMapping fresh = MapPrivate(rounded, Pages::kHuge);
    if (!fresh) throw std::bad_alloc();
    memory_ = std::move(fresh);
  }
  return memory_.get().data;
}

}  // namespace jax_ub
