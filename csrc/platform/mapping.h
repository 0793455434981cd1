// Memory that the system maps, owned; and private memory of one's own page size.
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

// Huge pages save misses of the TLB; small ones are soon filled when they are touched.
enum class Pages { kHuge, kSmall };

// Private memory of zeros, reserved now and taken as it is touched; none where there is
// not so much. Its pages are only advice: a system without huge ones refuses it.
HostMapping MapPrivate(size_t size_bytes, Pages pages) noexcept;

}  // namespace jax_ub
