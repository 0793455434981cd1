// Compares the GEMM with a naive product, on every instruction set that this machine
// supports.

#include "gemm/gemm.h"

#include <cfenv>
#include <vector>

#include "check.h"
#include "compare_gemm.h"
#include "gemm/cpu/isa.h"

namespace jax_ub {

void CompareWithReference(Values values, int num_problems, uint64_t first_seed) {
  const std::string_view in_use = CurrentIsa();
  for (std::string_view isa : AvailableIsas()) {
    SetIsa(isa);
    for (int i = 0; i < num_problems; i += kCaseStep) {
      CompareOne(first_seed + i, values, IsaInUse());
    }
  }
  SetIsa(in_use);
}

TEST(products_of_small_integers_are_exact) {
  CompareWithReference(Values::kIntegers, 400, 1);
}

TEST(products_of_normal_numbers_are_close) {
  CompareWithReference(Values::kNormal, 200, 10001);
}

#if defined(__x86_64__)
TEST(the_default_is_the_newest_instruction_set_but_not_avx512_bf16_on_intel) {
  std::string_view newest = AvailableIsas().back();
  if (newest == "avx512_bf16" && __builtin_cpu_is("intel")) newest = "avx512_vbmi";
  CHECK(CurrentIsa() == newest);
}
#endif

// Returns all elements of the result, replica by replica.
std::vector<float> Elements(const RandomGemm& gemm) {
  const GemmProblem& problem = gemm.problem;
  std::vector<float> elements;
  for (int replica = 0; replica < problem.c.num_replicas; ++replica) {
    for (int64_t i = 0; i < problem.m * problem.n; ++i) {
      const std::byte* at = gemm.At(replica, i / problem.n, i % problem.n);
      elements.push_back(Read(at, problem.c.dtype));
    }
  }
  return elements;
}

TEST(bits_depend_neither_on_the_order_of_units_nor_on_the_number_of_workers) {
  for (uint64_t seed = 1; seed <= 60; seed += kCaseStep) {
    Random random(seed);
    const GemmSizes sizes = RandomSizes(random);
    std::vector<float> first;
    for (int num_workers : {1, 2, 7, 64}) {
      const auto gemm = MakeGemm(seed, sizes, Values::kNormal);
      RunUnits(*PlanGemm(gemm->problem, num_workers), &random);
      const std::vector<float> elements = Elements(*gemm);
      if (num_workers == 1) first = elements;
      CHECK(std::memcmp(elements.data(), first.data(), 4 * first.size()) == 0);
    }
  }
}

// Large replicas are written by non-temporal stores, in vectors that begin wherever the
// rows do.
TEST(large_replicas_are_what_the_first_one_is) {
  constexpr int64_t kRows = 400, kColumns = 1101, kDepth = 6;
  constexpr int kReplicas = 5;
  for (DType dtype : {DType::kF32, DType::kBF16}) {
    const int64_t bytes = SizeOf(dtype);
    std::vector<std::byte> a(kRows * kDepth * bytes);
    std::vector<std::byte> b(kDepth * kColumns * bytes);
    for (int64_t i = 0; i < kRows * kDepth; ++i) Write(&a[i * bytes], dtype, i % 7 - 3);
    for (int64_t i = 0; i < kDepth * kColumns; ++i) {
      Write(&b[i * bytes], dtype, i % 5 - 2);
    }
    const int64_t replica_bytes = kRows * kColumns * bytes;
    std::vector<std::byte> c(kReplicas * (replica_bytes + bytes), std::byte{0x55});
    GemmProblem problem;
    problem.m = kRows;
    problem.n = kColumns;
    problem.k = kDepth;
    problem.a = {dtype, {0, kRows}, {0, kDepth}, {{a.data(), kDepth, 1}}};
    problem.b = {dtype, {0, kColumns}, {0, kDepth}, {{b.data(), 1, kColumns}}};
    problem.c = {dtype, kReplicas, {0, kRows}, {0, kColumns}, {}};
    for (int i = 0; i < kReplicas; ++i) {
      problem.c.segments.push_back({&c[i * (replica_bytes + bytes)], kColumns});
    }
    RunUnits(*PlanGemm(problem, 2));
    int64_t num_wrong = 0;
    for (int64_t i = 0; i < kRows * kColumns; ++i) {
      float expected = 0;
      for (int64_t k = 0; k < kDepth; ++k) {
        expected += static_cast<float>((i / kColumns * kDepth + k) % 7 - 3) *
                    static_cast<float>((k * kColumns + i % kColumns) % 5 - 2);
      }
      for (const Segment& replica : problem.c.segments) {
        num_wrong += Read(replica.data + i * bytes, dtype) != expected;
      }
    }
    CHECK_EQ(num_wrong, 0);
    // The memory between them is not accessed.
    for (int i = 0; i < kReplicas; ++i) {
      CHECK(c[i * (replica_bytes + bytes) + replica_bytes] == std::byte{0x55});
    }
  }
}

// [2, 3] x [3, 4], dense: each test below makes one field of it invalid.
GemmProblem SmallProblem() {
  static std::byte memory[64];
  GemmProblem problem;
  problem.m = 2;
  problem.n = 4;
  problem.k = 3;
  problem.a = {DType::kF32, {0, 2}, {0, 3}, {{memory, 3, 1}}};
  problem.b = {DType::kF32, {0, 4}, {0, 3}, {{memory, 1, 4}}};
  problem.c = {DType::kF32, 1, {0, 2}, {0, 4}, {{memory, 4}}};
  return problem;
}

TEST(views_that_disagree_with_the_sizes_are_refused) {
  GemmProblem problem = SmallProblem();
  problem.m = -2;
  CHECK_THROWS(PlanGemm(problem, 1), "sizes M=-2 N=4 K=3 must not be negative");
  problem = SmallProblem();
  problem.k = 5;
  CHECK_THROWS(PlanGemm(problem, 1), "A's K bounds {0, 3} must run from 0 to 5");
  problem = SmallProblem();
  problem.b.outer_bounds = {0, 3, 2, 4};
  CHECK_THROWS(PlanGemm(problem, 1), "B's N bounds fall from 3 to 2");
  problem = SmallProblem();
  problem.c.row_bounds = {0, 1, 2};
  CHECK_THROWS(PlanGemm(problem, 1), "C has 1 segments, expected 2");
}

TEST(segments_that_cannot_be_read_are_refused) {
  GemmProblem problem = SmallProblem();
  problem.a.segments[0].inner_stride = 2;
  CHECK_THROWS(PlanGemm(problem, 1), "strides 3 and 2, one of them must be 1");
  problem = SmallProblem();
  problem.b.segments[0].data = nullptr;
  CHECK_THROWS(PlanGemm(problem, 1), "B's N segment is null");
  problem = SmallProblem();
  problem.c.num_replicas = 0;
  CHECK_THROWS(PlanGemm(problem, 1), "C has 0 replicas, expected at least 1");
  problem = SmallProblem();
  problem.addends.resize(1);
  CHECK_THROWS(PlanGemm(problem, 1), "an addend has 0 segments, expected 1");
  problem.addends.resize(8);
  CHECK_THROWS(PlanGemm(problem, 1), "8 addends, at most 7 are supported");
}

TEST(an_instruction_set_that_is_not_here_is_refused) {
  CHECK_THROWS(SetIsa("mmx"),
               "instruction set 'mmx' is not available here; choose one of: portable");
}

// Returns every element of a product of `m` rows and 64 columns in which all elements of
// the operands are a and b, multiplied by `factors`. With `by_row_and_column`, the first
// factor has a copy for each row, and the second one for each column.
std::vector<float> ProductOf(float a,
                             float b,
                             int64_t m,
                             const std::vector<float>& factors = {},
                             bool by_row_and_column = false) {
  constexpr int64_t kColumns = 64;
  std::vector<float> results(m * kColumns, 5);
  GemmProblem problem;
  problem.m = m;
  problem.n = kColumns;
  problem.k = 1;
  auto bytes = [](const float& x) { return reinterpret_cast<const std::byte*>(&x); };
  problem.a = {DType::kF32, {0, m}, {0, 1}, {{bytes(a), 0, 1}}};
  problem.b = {DType::kF32, {0, kColumns}, {0, 1}, {{bytes(b), 0, 1}}};
  auto* const data = reinterpret_cast<std::byte*>(results.data());
  problem.c = {DType::kF32, 1, {0, m}, {0, kColumns}, {{data, kColumns}}};
  std::vector<std::vector<float>> copies;
  for (const float factor : factors) copies.emplace_back(m + kColumns, factor);
  for (const std::vector<float>& factor : copies) {
    const bool is_first = problem.factors.empty();
    const int64_t row_stride = by_row_and_column && is_first ? 1 : 0;
    const int64_t column_stride = by_row_and_column && !is_first ? 1 : 0;
    problem.factors.push_back({{{factor.data(), row_stride, column_stride}}});
  }
  RunUnits(*PlanGemm(problem, 1));
  return results;
}

TEST(subnormal_numbers_count_as_zero) {
  for (const int64_t m : {1, 40}) {
    for (const float result : ProductOf(1e-40f, 1.0f, m)) CHECK_EQ(result, 0.0f);
  }
}

// Factors are multiplied with each other first, unless f32 cannot represent the product.
TEST(factors_whose_product_overflows_or_underflows_are_exact) {
  for (const int64_t m : {1, 40}) {
    for (const bool by_row_and_column : {false, true}) {
      const auto check = [&](float a, float b, std::vector<float> factors,
                             float wanted) {
        for (const float x : ProductOf(a, b, m, factors, by_row_and_column)) {
          CHECK_EQ(x, wanted);
        }
      };
      check(0x1p50f, 0x1p50f, {0x1p-100f, 0x1p-40f}, 0x1p-40f);
      check(0x1p-50f, 0x1p-50f, {0x1p100f, 0x1p40f}, 0x1p40f);
      check(0x1p100f, 0x1p20f, {0x1p20f, 0x1p-30f}, 0x1p110f);
      check(0x1p-9f, 0x1p-9f, {0x1p-120f, 0x1p115f}, 0x1p-23f);
    }
  }
}

TEST(products_round_to_the_nearest_whatever_mode_the_thread_is_in) {
  const float x = 1 + 0x1p-12f;  // x * x is halfway: 1 + 2^-11 is even
  for (const int mode : {FE_UPWARD, FE_DOWNWARD, FE_TOWARDZERO}) {
    for (const int64_t m : {1, 40}) {
      std::fesetround(mode);
      const std::vector<float> results = ProductOf(x, x, m);
      CHECK_EQ(std::fegetround(), mode);
      std::fesetround(FE_TONEAREST);
      for (const float result : results) CHECK_EQ(result, 1 + 0x1p-11f);
    }
  }
}

}  // namespace jax_ub

CHECK_MAIN()
