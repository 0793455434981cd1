// FNV-1a hashes that identify call sites and calls. All processes compute the same
// values.
#pragma once

#include <cstdint>
#include <string_view>

namespace jax_ub {

// Initial value and step of the FNV-1a hash over integers.
inline constexpr uint64_t kHashBegin = 0xcbf29ce484222325u;
constexpr uint64_t Mix(uint64_t hash, uint64_t value) {
  return (hash ^ value) * 0x100000001b3u;
}

// Hashes the bytes of `text`.
constexpr uint64_t Mix(uint64_t hash, std::string_view text) {
  for (const char c : text) hash = Mix(hash, static_cast<unsigned char>(c));
  return hash;
}

}  // namespace jax_ub
