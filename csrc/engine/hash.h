// Numbers that stand for what processes know a call by: the same in all of them.
#pragma once

#include <cstdint>
#include <string_view>

namespace jax_ub {

// FNV-1a over whole numbers.
inline constexpr uint64_t kHashBegin = 0xcbf29ce484222325u;
constexpr uint64_t Mix(uint64_t hash, uint64_t value) {
  return (hash ^ value) * 0x100000001b3u;
}

// Over a text's bytes.
constexpr uint64_t Mix(uint64_t hash, std::string_view text) {
  for (const char c : text) hash = Mix(hash, static_cast<unsigned char>(c));
  return hash;
}

}  // namespace jax_ub
