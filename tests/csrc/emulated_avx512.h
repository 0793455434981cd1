// Emulates the AVX512 intrinsics that simd_avx512.h and simd_bf16_pairs.h use in plain
// C++, so that the AVX512 kernels run in a unit test on machines without AVX512.
// Follows Intel's description of each operation, element by element. Lanes are numbered
// from the lowest address.
#pragma once

#include <stdint.h>
#include <string.h>

#include <array>
#include <bit>
#include <cmath>

struct __m512 {
  float f[16];
};
struct __m512i {
  uint32_t u[16];
};
struct __m512bh {
  uint16_t h[32];
};
struct __m256i {
  uint16_t h[16];
};
struct __m128i {
  uint8_t b[16];
};
using __mmask16 = uint16_t;
using __mmask32 = uint32_t;

inline constexpr int _CMP_UNORD_Q = 3;
inline constexpr int _MM_FROUND_TO_NEAREST_INT = 0;
inline constexpr int _MM_FROUND_NO_EXC = 8;
inline constexpr int _MM_HINT_T0 = 3;

inline void _mm_prefetch(const char*, int) {}

inline __m512 _mm512_setzero_ps() { return {}; }
inline __m512 _mm512_loadu_ps(const void* p) {
  __m512 v;
  memcpy(&v, p, sizeof v);
  return v;
}
inline void _mm512_storeu_ps(void* p, __m512 v) { memcpy(p, &v, sizeof v); }
inline __m256i _mm256_loadu_si256(const __m256i* p) {
  __m256i v;
  memcpy(&v, p, sizeof v);
  return v;
}
inline void _mm256_storeu_si256(__m256i* p, __m256i v) { memcpy(p, &v, sizeof v); }

inline __m512i _mm512_loadu_si512(const void* p) {
  __m512i v;
  memcpy(&v, p, sizeof v);
  return v;
}
inline __m128i _mm_loadu_si128(const __m128i* p) {
  __m128i v;
  memcpy(&v, p, sizeof v);
  return v;
}

inline __m512i _mm512_castps_si512(__m512 v) { return std::bit_cast<__m512i>(v); }
inline __m512 _mm512_castsi512_ps(__m512i v) { return std::bit_cast<__m512>(v); }

// dst[i] = of(i)
template <typename Of>
__m512 EmulatedFloats(Of of) {
  __m512 v;
  for (int i = 0; i < 16; ++i) v.f[i] = of(i);
  return v;
}
template <typename Of>
__m512i EmulatedWords(Of of) {
  __m512i v;
  for (int i = 0; i < 16; ++i) v.u[i] = of(i);
  return v;
}

inline __m512 _mm512_set1_ps(float x) {
  return EmulatedFloats([&](int) { return x; });
}
inline __m512i _mm512_set1_epi32(int x) {
  return EmulatedWords([&](int) { return static_cast<uint32_t>(x); });
}
inline __m512 _mm512_add_ps(__m512 a, __m512 b) {
  return EmulatedFloats([&](int i) { return a.f[i] + b.f[i]; });
}
inline __m512 _mm512_mul_ps(__m512 a, __m512 b) {
  return EmulatedFloats([&](int i) { return a.f[i] * b.f[i]; });
}
inline __m512 _mm512_fmadd_ps(__m512 a, __m512 b, __m512 c) {
  return EmulatedFloats([&](int i) { return std::fma(a.f[i], b.f[i], c.f[i]); });
}
inline __m512i _mm512_add_epi32(__m512i a, __m512i b) {
  return EmulatedWords([&](int i) { return a.u[i] + b.u[i]; });
}
inline __m512i _mm512_and_si512(__m512i a, __m512i b) {
  return EmulatedWords([&](int i) { return a.u[i] & b.u[i]; });
}
inline __m512i _mm512_or_si512(__m512i a, __m512i b) {
  return EmulatedWords([&](int i) { return a.u[i] | b.u[i]; });
}
inline __m512i _mm512_slli_epi32(__m512i a, unsigned count) {
  return EmulatedWords([&](int i) { return a.u[i] << count; });
}
inline __m512i _mm512_srli_epi32(__m512i a, unsigned count) {
  return EmulatedWords([&](int i) { return a.u[i] >> count; });
}

// dst[i] = mask[i] ? a[i] | b[i] : source[i]
inline __m512i _mm512_mask_or_epi32(__m512i source,
                                    __mmask16 mask,
                                    __m512i a,
                                    __m512i b) {
  return EmulatedWords(
      [&](int i) { return mask >> i & 1 ? a.u[i] | b.u[i] : source.u[i]; });
}

// Supports only the unordered comparison: bit i is set if a[i] or b[i] is NaN.
inline __mmask16 _mm512_cmp_ps_mask(__m512 a, __m512 b, int) {
  __mmask16 mask = 0;
  for (int i = 0; i < 16; ++i) {
    if (std::isnan(a.f[i]) || std::isnan(b.f[i])) mask |= 1u << i;
  }
  return mask;
}

inline __m512i _mm512_cvtepu16_epi32(__m256i a) {
  return EmulatedWords([&](int i) { return uint32_t{a.h[i]}; });
}
inline __m256i _mm512_cvtepi32_epi16(__m512i a) {
  __m256i v;
  for (int i = 0; i < 16; ++i) v.h[i] = static_cast<uint16_t>(a.u[i]);
  return v;
}

// Operations on 32 lanes of 16 bits.
using EmulatedHalves = std::array<uint16_t, 32>;
inline EmulatedHalves HalvesOf(__m512i v) { return std::bit_cast<EmulatedHalves>(v); }
// dst[i] = of(i)
template <typename Of>
__m512i EmulatedFromHalves(Of of) {
  EmulatedHalves halves;
  for (int i = 0; i < 32; ++i) halves[i] = static_cast<uint16_t>(of(i));
  return std::bit_cast<__m512i>(halves);
}
template <typename Of>
__mmask32 EmulatedMask32(Of of) {
  __mmask32 mask = 0;
  for (int i = 0; i < 32; ++i) mask |= of(i) ? 1u << i : 0;
  return mask;
}
inline __m512i _mm512_set1_epi16(int16_t x) {
  return EmulatedFromHalves([&](int) { return x; });
}
inline __m512i _mm512_add_epi16(__m512i a, __m512i b) {
  return EmulatedFromHalves([&](int i) { return HalvesOf(a)[i] + HalvesOf(b)[i]; });
}
inline __m512i _mm512_slli_epi16(__m512i a, unsigned count) {
  return EmulatedFromHalves([&](int i) { return HalvesOf(a)[i] << count; });
}
inline __mmask32 _mm512_cmpgt_epi16_mask(__m512i a, __m512i b) {
  return EmulatedMask32([&](int i) {
    return static_cast<int16_t>(HalvesOf(a)[i]) > static_cast<int16_t>(HalvesOf(b)[i]);
  });
}
inline __mmask32 _mm512_testn_epi16_mask(__m512i a, __m512i b) {
  return EmulatedMask32([&](int i) { return (HalvesOf(a)[i] & HalvesOf(b)[i]) == 0; });
}
inline __m512i _mm512_mask_add_epi16(__m512i source,
                                     __mmask32 mask,
                                     __m512i a,
                                     __m512i b) {
  return EmulatedFromHalves([&](int i) {
    return mask >> i & 1 ? HalvesOf(a)[i] + HalvesOf(b)[i] : HalvesOf(source)[i];
  });
}
// dst[i] = mask[i] ? a[indices[i] % 32] : source[i]
inline __m512i _mm512_mask_permutexvar_epi16(__m512i source,
                                             __mmask32 mask,
                                             __m512i indices,
                                             __m512i a) {
  return EmulatedFromHalves([&](int i) {
    return mask >> i & 1 ? HalvesOf(a)[HalvesOf(indices)[i] % 32] : HalvesOf(source)[i];
  });
}
inline __m512i _mm512_cvtepu8_epi32(__m128i a) {
  return EmulatedWords([&](int i) { return uint32_t{a.b[i]}; });
}
inline __m512i _mm512_cvtepu8_epi16(__m256i a) {
  const auto bytes = std::bit_cast<std::array<uint8_t, 32>>(a);
  return EmulatedFromHalves([&](int i) { return bytes[i]; });
}

// Operations on 64 bytes.
using EmulatedBytes = std::array<uint8_t, 64>;
inline EmulatedBytes BytesOfVector(__m512i v) {
  return std::bit_cast<EmulatedBytes>(v);
}
// dst[i] = of(i)
template <typename Of>
__m512i EmulatedFromBytes(Of of) {
  EmulatedBytes bytes;
  for (int i = 0; i < 64; ++i) bytes[i] = of(i);
  return std::bit_cast<__m512i>(bytes);
}
// dst[i] = the element of (a, b) with the index indices[i] % 128
inline __m512i _mm512_permutexvar_epi8(__m512i indices, __m512i a) {
  return EmulatedFromBytes(
      [&](int i) { return BytesOfVector(a)[BytesOfVector(indices)[i] % 64]; });
}
inline __m512i _mm512_permutex2var_epi8(__m512i a, __m512i indices, __m512i b) {
  return EmulatedFromBytes([&](int i) {
    const int from = BytesOfVector(indices)[i] % 128;
    return BytesOfVector(from < 64 ? a : b)[from % 64];
  });
}
// In each 128-bit quarter q: a[16q + first], b[16q + first], a[16q + first + 1], ...
inline __m512i EmulatedUnpack8(__m512i a, __m512i b, int first) {
  return EmulatedFromBytes([&](int i) {
    const int from = i / 16 * 16 + first + i % 16 / 2;
    return BytesOfVector(i % 2 == 0 ? a : b)[from];
  });
}
inline __m512i _mm512_unpacklo_epi8(__m512i a, __m512i b) {
  return EmulatedUnpack8(a, b, 0);
}
inline __m512i _mm512_unpackhi_epi8(__m512i a, __m512i b) {
  return EmulatedUnpack8(a, b, 8);
}
// Bit j of each element of dst is bit 4 a[j] + 2 b[j] + c[j] of `table`.
inline __m512i _mm512_ternarylogic_epi32(__m512i a, __m512i b, __m512i c, int table) {
  return EmulatedWords([&](int i) {
    uint32_t bits = 0;
    for (int j = 0; j < 32; ++j) {
      const uint32_t at =
          (a.u[i] >> j & 1) * 4 + (b.u[i] >> j & 1) * 2 + (c.u[i] >> j & 1);
      bits |= (static_cast<uint32_t>(table) >> at & 1) << j;
    }
    return bits;
  });
}
// The upper half of dst is undefined, and set to another number than zero here.
inline __m512i _mm512_castsi256_si512(__m256i a) {
  EmulatedHalves halves;
  halves.fill(0x5a5a);
  for (int i = 0; i < 16; ++i) halves[i] = a.h[i];
  return std::bit_cast<__m512i>(halves);
}

// Operations on vectors of 128 and 256 bits. dst[i] = of(i)
template <typename Of>
__m256i EmulatedHalves256(Of of) {
  __m256i v;
  for (int i = 0; i < 16; ++i) v.h[i] = static_cast<uint16_t>(of(i));
  return v;
}
inline __m256i _mm256_set1_epi16(int16_t x) {
  return EmulatedHalves256([&](int) { return x; });
}
inline __m256i _mm256_and_si256(__m256i a, __m256i b) {
  return EmulatedHalves256([&](int i) { return a.h[i] & b.h[i]; });
}
inline __m256i _mm256_slli_epi16(__m256i a, unsigned count) {
  return EmulatedHalves256([&](int i) { return a.h[i] << count; });
}
inline __m256i _mm256_cvtepi8_epi16(__m128i a) {
  return EmulatedHalves256([&](int i) { return static_cast<int8_t>(a.b[i]); });
}
inline __m128i _mm_set1_epi8(int8_t x) {
  __m128i v;
  memset(&v, x, sizeof v);
  return v;
}
inline __m128i _mm_or_si128(__m128i a, __m128i b) {
  for (int i = 0; i < 16; ++i) a.b[i] |= b.b[i];
  return a;
}
inline __mmask16 _mm_cmpneq_epi8_mask(__m128i a, __m128i b) {
  __mmask16 mask = 0;
  for (int i = 0; i < 16; ++i) mask |= a.b[i] != b.b[i] ? 1u << i : 0;
  return mask;
}
// dst[i] = mask[i] ? a[i] b[i] : source[i]
inline __m512 _mm512_mask_mul_ps(__m512 source, __mmask16 mask, __m512 a, __m512 b) {
  return EmulatedFloats(
      [&](int i) { return mask >> i & 1 ? a.f[i] * b.f[i] : source.f[i]; });
}

inline __m512 _mm512_cvtph_ps(__m256i a) {
  return EmulatedFloats([&](int i) {
    const int exponent = a.h[i] >> 10 & 31;
    const int fraction = a.h[i] & 1023;
    float x = exponent == 0
                  ? std::ldexp(static_cast<float>(fraction), -24)
                  : std::ldexp(static_cast<float>(fraction + 1024), exponent - 25);
    if (exponent == 31) x = fraction != 0 ? NAN : INFINITY;
    return a.h[i] & 0x8000 ? -x : x;
  });
}

// Supports only rounding to nearest even.
inline __m256i _mm512_cvtps_ph(__m512 a, int) {
  __m256i v;
  for (int i = 0; i < 16; ++i) {
    const double x = std::abs(static_cast<double>(a.f[i]));
    const int exponent = x < 0x1p-14 ? -14 : std::ilogb(x);
    uint16_t h = 0x7c00;
    if (std::isnan(a.f[i])) {
      h = 0x7e00;
    } else if (x < 65520) {
      h = static_cast<uint16_t>(std::nearbyint(std::ldexp(x, 10 - exponent)) +
                                (exponent + 14) * 1024.0);
    }
    v.h[i] = h | (std::signbit(a.f[i]) ? 0x8000 : 0);
  }
  return v;
}

// In each 128-bit quarter q: a[4q + first], b[4q + first], a[4q + first + 1], ...
inline __m512i EmulatedUnpack32(__m512i a, __m512i b, int first) {
  return EmulatedWords([&](int i) {
    const int from = i / 4 * 4 + first + i % 4 / 2;
    return i % 2 == 0 ? a.u[from] : b.u[from];
  });
}
inline __m512i _mm512_unpacklo_epi32(__m512i a, __m512i b) {
  return EmulatedUnpack32(a, b, 0);
}
inline __m512i _mm512_unpackhi_epi32(__m512i a, __m512i b) {
  return EmulatedUnpack32(a, b, 2);
}

// As above, with 64-bit elements: one of a, one of b.
inline __m512i EmulatedUnpack64(__m512i a, __m512i b, int first) {
  return EmulatedWords([&](int i) {
    const int from = i / 4 * 4 + first + i % 2;
    return i % 4 < 2 ? a.u[from] : b.u[from];
  });
}
inline __m512i _mm512_unpacklo_epi64(__m512i a, __m512i b) {
  return EmulatedUnpack64(a, b, 0);
}
inline __m512i _mm512_unpackhi_epi64(__m512i a, __m512i b) {
  return EmulatedUnpack64(a, b, 2);
}

// Selects quarters 0 and 1 from a, and 2 and 3 from b, each by two bits of `choice`.
inline __m512i _mm512_shuffle_i32x4(__m512i a, __m512i b, int choice) {
  return EmulatedWords([&](int i) {
    const int quarter = i / 4;
    const int from = (choice >> 2 * quarter & 3) * 4 + i % 4;
    return quarter < 2 ? a.u[from] : b.u[from];
  });
}

// dst[i] = sum[i] + a[2i + 1] b[2i + 1] + a[2i] b[2i], with the fused rounding of the
// two steps. Subnormal operands and results are replaced by zero.
inline __m512 _mm512_dpbf16_ps(__m512 sum, __m512bh a, __m512bh b) {
  auto widen = [](uint16_t h) {
    const float x = std::bit_cast<float>(uint32_t{h} << 16);
    return std::fpclassify(x) == FP_SUBNORMAL ? std::copysign(0.0f, x) : x;
  };
  auto flush = [](float x) {
    return std::fpclassify(x) == FP_SUBNORMAL ? std::copysign(0.0f, x) : x;
  };
  return EmulatedFloats([&](int i) {
    const float high =
        flush(std::fma(widen(a.h[2 * i + 1]), widen(b.h[2 * i + 1]), flush(sum.f[i])));
    return flush(std::fma(widen(a.h[2 * i]), widen(b.h[2 * i]), high));
  });
}
