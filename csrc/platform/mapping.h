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

// The page size of private memory. Huge pages reduce TLB misses; small pages are faster
// to fault in.
enum class Pages { kHuge, kSmall };

// Maps private, zero-filled memory. Physical pages are allocated on first access.
// Returns an empty handle if the mapping fails. `pages` is only a hint: a system
// without huge pages ignores it.
HostMapping MapPrivate(size_t size_bytes, Pages pages) noexcept;

}  // namespace jax_ub
