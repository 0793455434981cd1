// Products of FP8 operands, on every instruction set that this machine has.

#include <vector>

#include "each_isa.h"
#include "fp8_codes.h"

namespace jax_ub {

TEST(every_fp8_code_and_product_is_exact) {
  ForEachIsa([](const Isa& isa) {
    CompareAllCodes(*isa.bf16);
    if (isa.general != isa.bf16) CompareAllCodes(*isa.general);
  });
}

// Over segments, layouts, addends and replicas; the results are f32, bf16 and f16.
TEST(fp8_products_of_small_integers_are_exact) {
  ForEachIsa([](const Isa& isa) {
    for (uint64_t seed = 1; seed <= 120; seed += kCaseStep) {
      CompareOne(seed, Values::kIntegers, isa, kFp8Pairs[seed % 3]);
    }
  });
}

TEST(fp8_products_of_normal_numbers_are_close) {
  ForEachIsa([](const Isa& isa) {
    for (uint64_t seed = 10001; seed <= 10060; seed += kCaseStep) {
      CompareOne(seed, Values::kNormal, isa, kFp8Pairs[seed % 3]);
    }
  });
}

TEST(fp8_times_a_wider_operand_is_exact) {
  ForEachIsa([](const Isa& isa) {
    for (uint64_t seed = 1; seed <= 30; seed += kCaseStep) {
      const DType wide = static_cast<DType>(seed % 3);
      CompareOne(seed, Values::kIntegers, isa, OperandDTypes(DType::kE4M3, wide));
      CompareOne(seed, Values::kIntegers, isa, OperandDTypes(wide, DType::kE5M2));
    }
  });
}

// Sums stay below 2^24, so that f32 represents them exactly: K = 2^17 products of up to
// 64.
TEST(long_fp8_sums_are_exact) {
  constexpr int64_t kRows = 6, kColumns = 5, kDepth = 1 << 17;
  ForEachIsa([](const Isa& isa) {
    for (const OperandDTypes& dtypes : kFp8Pairs) {
      Random random(7);
      const auto largest = [](DType dtype) { return dtype == DType::kE4M3 ? 8 : 4; };
      std::vector<std::byte> a(kRows * kDepth), b(kDepth * kColumns);
      for (std::byte& x : a) {
        const int64_t limit = largest(dtypes.a);
        Write(&x, dtypes.a, static_cast<float>(Pick(random, -limit, limit)));
      }
      for (std::byte& x : b) {
        const int64_t limit = largest(dtypes.b);
        Write(&x, dtypes.b, static_cast<float>(Pick(random, -limit, limit)));
      }
      std::vector<float> c(kRows * kColumns);
      GemmProblem problem;
      problem.m = kRows;
      problem.n = kColumns;
      problem.k = kDepth;
      problem.a = {dtypes.a, {0, kRows}, {0, kDepth}, {{a.data(), kDepth, 1}}};
      problem.b = {dtypes.b, {0, kColumns}, {0, kDepth}, {{b.data(), 1, kColumns}}};
      auto* const to = reinterpret_cast<std::byte*>(c.data());
      problem.c = {DType::kF32, 1, {0, kRows}, {0, kColumns}, {{to, kColumns}}};
      RunUnits(*PlanCpuGemm(problem, KernelsFor(isa, dtypes.a, dtypes.b), 1));
      for (int64_t i = 0; i < kRows * kColumns; ++i) {
        int64_t expected = 0;
        for (int64_t k = 0; k < kDepth; ++k) {
          expected +=
              static_cast<int64_t>(Read(&a[i / kColumns * kDepth + k], dtypes.a)) *
              static_cast<int64_t>(Read(&b[k * kColumns + i % kColumns], dtypes.b));
        }
        CHECK_EQ(static_cast<int64_t>(c[i]), expected);
      }
    }
  });
}

TEST(results_are_no_fp8) {
  static std::byte memory[64];
  GemmProblem problem;
  problem.m = problem.n = problem.k = 1;
  problem.a = {DType::kE4M3, {0, 1}, {0, 1}, {{memory, 1, 1}}};
  problem.b = {DType::kE4M3, {0, 1}, {0, 1}, {{memory, 1, 1}}};
  problem.c = {DType::kE4M3, 1, {0, 1}, {0, 1}, {{memory, 1}}};
  CHECK_THROWS(PlanGemm(problem, 1), "C is e4m3, which GEMMs do not store");
}

}  // namespace jax_ub

CHECK_MAIN()
