#include "platform/mapping.h"

#include <sys/mman.h>

namespace jax_ub {

void MappingTraits::Close(MappedRange mapping) noexcept {
  static_cast<void>(munmap(mapping.data, mapping.size));
}

HostMapping MapPrivate(size_t size_bytes, Pages pages) noexcept {
  void* const data = mmap(nullptr, size_bytes, PROT_READ | PROT_WRITE,
                          MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (data == MAP_FAILED) return {};
  const int advice = pages == Pages::kHuge ? MADV_HUGEPAGE : MADV_NOHUGEPAGE;
  static_cast<void>(madvise(data, size_bytes, advice));
  return HostMapping({.data = static_cast<std::byte*>(data), .size = size_bytes});
}

}  // namespace jax_ub
