// Compares what kernels make of all FP8 codes with the definition of the formats.
#pragma once

#include <cmath>
#include <cstring>
#include <vector>

#include "compare_gemm.h"

namespace jax_ub {

// Equal numbers, or two NaNs.
inline bool AreSame(float left, float right) {
  return left == right ? std::signbit(left) == std::signbit(right)
                       : std::isnan(left) && std::isnan(right);
}

// KernelSet::widen, from every code on, for lengths with and without a tail.
inline void CompareWidenedCodes(const KernelSet& kernels) {
  const DType to = kernels.k_per_word == 1 ? DType::kF32 : DType::kBF16;
  for (DType dtype : {DType::kE4M3, DType::kE5M2}) {
    std::vector<std::byte> codes(512);
    for (int i = 0; i < 512; ++i) codes[i] = static_cast<std::byte>(i);
    for (int64_t count : {1, 3, 31, 32, 33, 256}) {
      for (int64_t first = 0; first < 256; first += count) {
        std::vector<std::byte> wide(count * SizeOf(to));
        kernels.widen[static_cast<int>(dtype)](&codes[first], count, wide.data());
        int64_t num_wrong = 0;
        for (int64_t i = 0; i < count; ++i) {
          num_wrong +=
              !AreSame(Read(&wide[i * SizeOf(to)], to), Read(&codes[first + i], dtype));
        }
        CHECK_EQ(num_wrong, 0);
      }
    }
  }
}

// KernelSet::pack_b, of all codes in every lane, for several whole panels and for
// columns and words that do not fill a vector.
inline void ComparePackedCodes(const KernelSet& kernels) {
  const DType to = kernels.k_per_word == 1 ? DType::kF32 : DType::kBF16;
  const int64_t width = kernels.tile_columns;
  for (int variant = 0; variant < 4; ++variant) {
    const bool is_transposed = variant & 1;
    const DType dtype = variant & 2 ? DType::kE5M2 : DType::kE4M3;
    const PackFunction pack =
        (is_transposed ? kernels.pack_b.transposed
                       : kernels.pack_b.copied)[static_cast<int>(dtype)];
    for (int64_t outer : {2 * width, width + width / 2 + 1}) {
      for (int64_t num_words : {256, 35, 17}) {
        const int64_t depth = num_words * kernels.k_per_word;
        const int64_t stride = is_transposed ? depth : outer;
        const auto code_at = [&](int64_t o, int64_t k) {
          return static_cast<int>((o + 3 * k) % 256);
        };
        std::vector<std::byte> source(outer * depth + kLineBytes);
        for (int64_t o = 0; o < outer; ++o) {
          for (int64_t k = 0; k < depth; ++k) {
            source[is_transposed ? o * stride + k : k * stride + o] =
                static_cast<std::byte>(code_at(o, k));
          }
        }
        const int64_t panel_bytes = 4 * num_words * width;
        std::vector<std::byte> panels(2 * panel_bytes);
        pack(source.data(), stride, outer, num_words, panels.data(), panel_bytes);
        int64_t num_wrong = 0;
        for (int64_t o = 0; o < outer; ++o) {
          for (int64_t k = 0; k < depth; ++k) {
            const int64_t word = k / kernels.k_per_word * width + o % width;
            const std::byte* const element =
                &panels[o / width * panel_bytes + 4 * word +
                        k % kernels.k_per_word * 2];
            num_wrong += !AreSame(Read(element, to), Fp8ToF32(code_at(o, k), dtype));
          }
        }
        CHECK_EQ(num_wrong, 0);
      }
    }
  }
}

// All products of two codes, 256 x 256, as one product or in products of `rows` rows.
// The codes are at k = 1 of K = 3, so that a pair of words has an empty half.
inline void CompareProductsOfCodes(const KernelSet& kernels, int64_t rows) {
  constexpr int64_t kDepth = 3;
  for (const OperandDTypes& dtypes : kFp8Pairs) {
    for (int layout = 0; layout < 4; ++layout) {
      const bool a_rows = layout & 1, b_rows = layout & 2;
      std::vector<std::byte> a(kDepth * 256), b(kDepth * 256);
      for (int i = 0; i < 256; ++i) {
        a[a_rows ? i * kDepth + 1 : 256 + i] = static_cast<std::byte>(i);
        b[b_rows ? i * kDepth + 1 : 256 + i] = static_cast<std::byte>(i);
      }
      std::vector<float> c(256 * 256);
      for (int64_t m = 0; m < 256; m += rows) {
        GemmProblem problem;
        problem.m = rows;
        problem.n = 256;
        problem.k = kDepth;
        const ConstSegment of_a = {&a[a_rows ? m * kDepth : m], a_rows ? kDepth : 1,
                                   a_rows ? 1 : 256};
        const ConstSegment of_b = {b.data(), b_rows ? kDepth : 1, b_rows ? 1 : 256};
        problem.a = {dtypes.a, {0, rows}, {0, kDepth}, {of_a}};
        problem.b = {dtypes.b, {0, 256}, {0, kDepth}, {of_b}};
        auto* const to = reinterpret_cast<std::byte*>(&c[m * 256]);
        problem.c = {DType::kF32, 1, {0, rows}, {0, 256}, {{to, 256}}};
        RunUnits(*PlanCpuGemm(problem, kernels, 1));
      }
      int64_t num_wrong = 0;
      for (int i = 0; i < 256 * 256; ++i) {
        const float expected =
            Fp8ToF32(i / 256, dtypes.a) * Fp8ToF32(i % 256, dtypes.b);
        // The sign of a zero is lost when zeros are added.
        num_wrong += expected == 0 ? c[i] != 0 : !AreSame(c[i], expected);
      }
      CHECK_EQ(num_wrong, 0);
    }
  }
}

// Multiplies all codes, in both operands and layouts, by e8m0 scales. The other
// operand has ones at k = 1. Subnormal products count as zero.
inline void CompareScaledCodes(const KernelSet& kernels) {
  constexpr int64_t kDepth = 32, kOnes = 9;
  for (int variant = 0; variant < 8; ++variant) {
    const bool is_b = variant & 1, is_contiguous = variant & 2;
    const DType dtype = variant & 4 ? DType::kE5M2 : DType::kE4M3;
    const int64_t stride = is_contiguous ? kDepth : 256, step = is_contiguous ? 1 : 256;
    const int64_t outer_stride = is_contiguous ? stride : 1;
    std::vector<std::byte> codes(kDepth * 256), ones(kDepth * kOnes);
    for (int i = 0; i < 256; ++i) {
      codes[i * outer_stride + step] = static_cast<std::byte>(i);
    }
    for (int i = 0; i < kOnes; ++i) ones[kOnes + i] = std::byte{0x38};
    OperandView of_codes = {
        dtype, {0, 256}, {0, kDepth}, {{codes.data(), outer_stride, step}}};
    const OperandView of_ones = {
        DType::kE4M3, {0, kOnes}, {0, kDepth}, {{ones.data(), 1, kOnes}}};
    // Each 7th, from 0, which is the smallest, to 254 and NaN.
    for (int bits = 0; bits < 256; bits += bits == 252 ? 2 : bits == 254 ? 1 : 7) {
      const std::vector<std::byte> scales(256, static_cast<std::byte>(bits));
      of_codes.scales = {{scales.data(), 1, 1, kDepth, 0}};
      std::vector<float> c(256 * kOnes);
      auto* const to = reinterpret_cast<std::byte*>(c.data());
      GemmProblem problem;
      problem.m = is_b ? kOnes : 256;
      problem.n = is_b ? 256 : kOnes;
      problem.k = kDepth;
      problem.a = is_b ? of_ones : of_codes;
      problem.b = is_b ? of_codes : of_ones;
      problem.c = {DType::kF32, 1, {0, problem.m}, {0, problem.n}, {{to, problem.n}}};
      RunUnits(*PlanCpuGemm(problem, kernels, 1));
      int64_t num_wrong = 0;
      for (int i = 0; i < 256; ++i) {
        const double x = std::ldexp(double{Fp8ToF32(i, dtype)}, bits - 127);
        float expected = bits == 255 ? NAN : static_cast<float>(x);
        if (std::abs(expected) < 0x1p-126f) expected = 0;
        for (int64_t j = 0; j < kOnes; ++j) {
          const float found = c[is_b ? j * 256 + i : i * kOnes + j];
          num_wrong += expected == 0 ? found != 0 : !AreSame(found, expected);
        }
      }
      CHECK_EQ(num_wrong, 0);
    }
  }
}

inline void CompareAllCodes(const KernelSet& kernels) {
  CompareScaledCodes(kernels);
  CompareWidenedCodes(kernels);
  ComparePackedCodes(kernels);
  CompareProductsOfCodes(kernels, 256);
  CompareProductsOfCodes(kernels, 4);
  CompareProductsOfCodes(kernels, 1);
}

}  // namespace jax_ub
