// Tests the AMX kernels with emulated intrinsics. Compiles the same source under other
// names, so that both versions can be linked.

#include "check.h"
#include "compare_gemm.h"
#include "fp8_codes.h"
#include "gemm/cpu/isa.h"

namespace jax_ub {

extern const KernelSet kEmulatedKernels;

}  // namespace jax_ub

#define JAX_UB_EMULATE_AVX512
#define kernels_amx_bf16 emulated_kernels
#define kAmxBf16Kernels kEmulatedKernels
#include "gemm/cpu/kernels_amx_bf16.cc"
#undef kAmxBf16Kernels

namespace jax_ub {

// The small block of K makes problems span several blocks, the second of which adds to
// the sums of the first.
constinit const KernelSet kTiles = [] {
  KernelSet set = emulated_kernels::KernelsOfTileRegisters("tile registers");
  set.k_block = 64;
  return set;
}();

constexpr Isa kSmallBlocks = {&kPortableKernels, &kTiles, nullptr};
constexpr Isa kEmulated = {&kPortableKernels, &kEmulatedKernels, nullptr};

TEST(emulated_products_of_small_integers_are_exact) {
  for (uint64_t seed = 1; seed <= 150; seed += kCaseStep) {
    CompareOne(seed, Values::kIntegers, seed % 4 ? kSmallBlocks : kEmulated,
               DType::kBF16);
  }
}

TEST(emulated_products_of_normal_numbers_are_close) {
  for (uint64_t seed = 10001; seed <= 10060; seed += kCaseStep) {
    CompareOne(seed, Values::kNormal, seed % 4 ? kSmallBlocks : kEmulated,
               DType::kBF16);
  }
}

TEST(emulated_tiles_are_exact_for_every_tail) {
  CompareTails(kTiles, 49, {1, 2, 31, 32, 33, 65});
}

TEST(emulated_fp8_products_are_exact) {
  CompareAllCodes(kTiles);
  for (uint64_t seed = 1; seed <= 60; seed += kCaseStep) {
    CompareOne(seed, Values::kIntegers, kSmallBlocks, kFp8Pairs[seed % 3]);
  }
  CompareTails(kTiles, 33, {1, 2, 33}, kFp8Pairs[2]);
}

// Rows that map to the same set of the L1 cache are copied, others are read in place.
TEST(rows_at_any_distance_are_exact) {
  constexpr int64_t kRows = 40, kColumns = 33, kDepth = 96;
  for (const int64_t stride : {96, 512, 1024, 2048, 2080}) {
    std::vector<std::byte> a(2 * kRows * stride);
    std::vector<std::byte> b(2 * kDepth * kColumns);
    std::vector<std::byte> c(4 * kRows * kColumns);
    for (int64_t i = 0; i < kRows * kDepth; ++i) {
      Write(&a[2 * (i / kDepth * stride + i % kDepth)], DType::kBF16, i % 7 - 3);
    }
    for (int64_t i = 0; i < kDepth * kColumns; ++i) {
      Write(&b[2 * i], DType::kBF16, i % 5 - 2);
    }
    GemmProblem problem;
    problem.m = kRows;
    problem.n = kColumns;
    problem.k = kDepth;
    problem.a = {DType::kBF16, {0, kRows}, {0, kDepth}, {{a.data(), stride, 1}}};
    problem.b = {DType::kBF16, {0, kColumns}, {0, kDepth}, {{b.data(), 1, kColumns}}};
    problem.c = {DType::kF32, 1, {0, kRows}, {0, kColumns}, {{c.data(), kColumns}}};
    RunUnits(*PlanCpuGemm(problem, kEmulatedKernels, 1));
    for (int64_t i = 0; i < kRows * kColumns; ++i) {
      float expected = 0;
      for (int64_t k = 0; k < kDepth; ++k) {
        expected += static_cast<float>((i / kColumns * kDepth + k) % 7 - 3) *
                    static_cast<float>((k * kColumns + i % kColumns) % 5 - 2);
      }
      CHECK_EQ(Read(&c[4 * i], DType::kF32), expected);
    }
  }
}

}  // namespace jax_ub

CHECK_MAIN()
