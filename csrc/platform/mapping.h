// Owned memory mappings, and private memory with a chosen page size.
#pragma once

#include <cstddef>

#include "platform/handle.h"

namespace jax_ub {

struct MappedRange {
  std::byte* data = nullptr;
  size_t size = 0;
  bool operator==(const MappedRange&) const = default;
};

struct MappingTraits {
  using Value = MappedRange;
  static constexpr Value kNone = {};
  static void Close(Value mapping) noexcept;
};

using HostMapping = UniqueHandle<MappingTraits>;

// Page size of private memory. Huge pages cause fewer TLB misses; small pages are
// faster to allocate at their first access.
enum class Pages { kHuge, kSmall };

// Maps private memory, initially zero. The kernel allocates a page at its first access.
// Returns an empty handle after an error. `pages` is only a hint.
HostMapping MapPrivate(size_t size_bytes, Pages pages) noexcept;

}  // namespace jax_ub
