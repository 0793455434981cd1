// FNV-1a hashes that identify call sites and calls. All processes compute the same
// values.
#pragma once

#include <cstdint>
#include <string_view>

namespace jax_ub {

// The FNV-1a hash: its initial value, and the function that adds an integer to a hash.
inline constexpr uint64_t kHashBegin = 0xcbf29ce484222325u;
constexpr uint64_t Mix(uint64_t hash, uint64_t value) {
  return (hash ^ value) * 0x100000001b3u;
}

// Adds the bytes of `text` to `hash` one by one, and returns the new hash.
constexpr uint64_t Mix(uint64_t hash, std::string_view text) {
  for (const char c : text) hash = Mix(hash, static_cast<unsigned char>(c));
  return hash;
}

}  // namespace jax_ub
