// Defines vectors of four f32 with GCC's vector extension of C++, for any x86-64 or
// AArch64 CPU.
#pragma once

#include <stdint.h>
#include <string.h>

#include "gemm/cpu/fp8.h"

namespace jax_ub::JAX_UB_KERNELS {

inline constexpr int kLanes = 4;
using Vec = float __attribute__((vector_size(16)));
using Bits = uint32_t __attribute__((vector_size(16)));

inline void Prefetch(const void* p) { __builtin_prefetch(p); }

inline Vec Zero() { return Vec{}; }

inline Vec Load(const void* p) {
  Vec v;
  memcpy(&v, p, sizeof v);
  return v;
}

inline void Store(void* p, Vec v) { memcpy(p, &v, sizeof v); }

inline Vec Broadcast(const void* p) {
  float x;
  memcpy(&x, p, sizeof x);
  return Vec{x, x, x, x};
}

inline Vec Add(Vec a, Vec b) { return a + b; }

// MultiplyAdd returns a * b + sum with two roundings, unlike the fused instructions of
// other instruction sets, which round once.
inline Vec Multiply(Vec a, Vec b) { return a * b; }
inline Vec MultiplyAdd(Vec a, Vec b, Vec sum) { return sum + a * b; }

inline Bits WidenBits(const void* p) {
  uint16_t h[kLanes];
  memcpy(h, p, sizeof h);
  return Bits{h[0], h[1], h[2], h[3]};
}

inline void NarrowBits(void* p, Bits b) {
  const uint16_t h[kLanes] = {static_cast<uint16_t>(b[0]), static_cast<uint16_t>(b[1]),
                              static_cast<uint16_t>(b[2]), static_cast<uint16_t>(b[3])};
  memcpy(p, h, sizeof h);
}

// Returns the lanes of `yes` where `mask` is all ones, and the lanes of `no` where it
// is zero.
template <typename Mask>
inline Bits Select(Mask mask, Bits yes, Bits no) {
  const Bits m = reinterpret_cast<Bits>(mask);
  return (yes & m) | (no & ~m);
}

inline Vec LoadBF16(const void* p) { return reinterpret_cast<Vec>(WidenBits(p) << 16); }

// Rounds f32 to bf16, to nearest even, and stores them. A NaN keeps its sign and
// becomes quiet.
inline void StoreBF16(void* p, Vec v) {
  const Bits u = reinterpret_cast<Bits>(v);
  const Bits rounded = (u + 0x7fff + ((u >> 16) & 1)) >> 16;
  NarrowBits(p, Select(v != v, (u >> 16) | 0x40, rounded));
}

// Converts f16 to f32. A subnormal f16 is fraction * 2^-24. The fraction with the
// exponent of 2^23 is a normal f32 with an integer value, so no intermediate result is
// a subnormal f32, which the CPU may flush to zero.
inline Vec LoadF16(const void* p) {
  const Bits h = WidenBits(p);
  const Bits magnitude = (h & 0x7fff) << 13;
  const Bits normal = magnitude + (112u << 23);
  const Vec fraction = reinterpret_cast<Vec>((h & 0x3ff) | 0x4b000000) - 0x1p23f;
  const Bits subnormal = reinterpret_cast<Bits>(fraction * 0x1p-24f);
  Bits value = Select((h & 0x7c00) == 0, subnormal, normal);
  value = Select((h & 0x7c00) == 0x7c00, magnitude | 0x7f800000, value);
  return reinterpret_cast<Vec>(value | ((h & 0x8000) << 16));
}

template <DType kDType>
inline Vec LoadFp8(const void* p) {
  uint8_t bytes[kLanes];
  memcpy(bytes, p, sizeof bytes);
  constexpr const uint16_t* kBF16 = kFp8Table<kDType>.bf16;
  const Bits wide = {kBF16[bytes[0]], kBF16[bytes[1]], kBF16[bytes[2]],
                     kBF16[bytes[3]]};
  return reinterpret_cast<Vec>(wide << 16);
}

// Rounds f32 to f16, to nearest even, and stores them. Below 2^-14, adding 0.5 aligns
// the last bits of a subnormal f16 and of the f32, so that the addition rounds
// correctly. Numbers from 65520 on become infinite.
inline void StoreF16(void* p, Vec v) {
  const Bits u = reinterpret_cast<Bits>(v);
  const Bits sign = (u >> 16) & 0x8000;
  const Bits magnitude = u & 0x7fffffff;
  const Bits normal =
      (magnitude - (112u << 23) + 0xfff + ((magnitude >> 13) & 1)) >> 13;
  const Vec aligned = reinterpret_cast<Vec>(magnitude) + 0.5f;
  const Bits subnormal = reinterpret_cast<Bits>(aligned) - 0x3f000000;
  Bits half = Select(magnitude < (113u << 23), subnormal, normal);
  half = Select(magnitude >= 0x477ff000, Bits{} + 0x7c00, half);
  half = Select(magnitude > 0x7f800000, 0x7e00 | ((magnitude >> 13) & 0x3ff), half);
  NarrowBits(p, half | sign);
}

// Transposes a kLanes x kLanes block of words in place.
inline void Transpose(Vec (&rows)[kLanes]) {
  const Vec t0 = __builtin_shuffle(rows[0], rows[1], Bits{0, 4, 1, 5});
  const Vec t1 = __builtin_shuffle(rows[0], rows[1], Bits{2, 6, 3, 7});
  const Vec t2 = __builtin_shuffle(rows[2], rows[3], Bits{0, 4, 1, 5});
  const Vec t3 = __builtin_shuffle(rows[2], rows[3], Bits{2, 6, 3, 7});
  rows[0] = __builtin_shuffle(t0, t2, Bits{0, 1, 4, 5});
  rows[1] = __builtin_shuffle(t0, t2, Bits{2, 3, 6, 7});
  rows[2] = __builtin_shuffle(t1, t3, Bits{0, 1, 4, 5});
  rows[3] = __builtin_shuffle(t1, t3, Bits{2, 3, 6, 7});
}

}  // namespace jax_ub::JAX_UB_KERNELS
