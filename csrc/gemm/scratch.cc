#include "gemm/scratch.h"

#include <sys/mman.h>

#include <new>

namespace jax_ub {

namespace {

// A huge page: packed panels are walked with strides that would miss a small TLB.
constexpr size_t kHugePage = size_t{2} << 20;

}  // namespace

Scratch::~Scratch() {
  if (data_ != nullptr) munmap(data_, size_bytes_);
}

std::byte* Scratch::Reserve(size_t size_bytes) {
  if (size_bytes <= size_bytes_) return data_;
  const size_t rounded = (size_bytes + kHugePage - 1) / kHugePage * kHugePage;
  void* fresh = mmap(nullptr, rounded, PROT_READ | PROT_WRITE,
                     MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (fresh == MAP_FAILED) throw std::bad_alloc();
#ifdef MADV_HUGEPAGE
  // Only advice: small pages are slower, not wrong.
  madvise(fresh, rounded, MADV_HUGEPAGE);
#endif
  if (data_ != nullptr) munmap(data_, size_bytes_);
  data_ = static_cast<std::byte*>(fresh);
  size_bytes_ = rounded;
  return data_;
}

}  // namespace jax_ub
