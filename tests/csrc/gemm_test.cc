// The GEMM against a naive product, on every instruction set that this machine has.

#include "gemm/gemm.h"

#include <numeric>

#include "check.h"
#include "gemm/cpu/plan.h"
#include "random_gemm.h"

namespace jax_ub {

void RunUnits(const GemmPlan& plan, Random* order = nullptr) {
  std::vector<int64_t> units(plan.num_units());
  std::iota(units.begin(), units.end(), 0);
  if (order != nullptr) std::shuffle(units.begin(), units.end(), *order);
  Scratch scratch;
  for (int64_t unit : units) plan.Run(unit, scratch);
}

GemmSizes RandomSizes(Random& random) {
  const int64_t kind = Pick(random, 0, 9);
  const int64_t large = kind < 7 ? 70 : 300;
  return {.m = Pick(random, 1, kind == 0 ? 4 : large),
          .n = Pick(random, 1, kind == 1 ? 4 : large),
          .k = Pick(random, 0, kind == 2 ? 4 : kind < 8 ? 90 : 1100),
          .max_parts = Pick(random, 1, 5)};
}

// Half a unit in the last place, relative to the number: what rounding may change.
double RoundingError(DType dtype) {
  if (dtype == DType::kF32) return std::ldexp(1.0, -24);
  return std::ldexp(1.0, dtype == DType::kBF16 ? -8 : -11);
}

int64_t CountWrong(const RandomGemm& gemm, Values values) {
  const GemmProblem& problem = gemm.problem;
  int64_t num_wrong = 0;
  for (int replica = 0; replica < problem.c.num_replicas; ++replica) {
    for (int64_t m = 0; m < problem.m; ++m) {
      for (int64_t n = 0; n < problem.n; ++n) {
        const int64_t at = m * problem.n + n;
        const double expected = gemm.expected[replica][at];
        const float found = Read(gemm.At(replica, m, n), problem.c.dtype);
        if (values == Values::kIntegers) {
          std::byte rounded[4];
          Write(rounded, problem.c.dtype, static_cast<float>(expected));
          num_wrong += found != Read(rounded, problem.c.dtype);
        } else {
          // Every addition rounds once, relative to the partial sum; plus the store.
          const double tolerance =
              std::ldexp(1.0, -24) * std::sqrt(problem.k + 4.0) * 4 *
                  gemm.magnitude[replica][at] +
              RoundingError(problem.c.dtype) * 1.01 * std::abs(expected) +
              std::ldexp(1.0, -25);
          num_wrong += !(std::abs(found - expected) <= tolerance);
        }
      }
    }
  }
  return num_wrong;
}

void CompareWithReference(Values values, int num_problems, uint64_t first_seed) {
  const std::string_view in_use = CurrentIsa();
  for (std::string_view isa : AvailableIsas()) {
    SetIsa(isa);
    for (int i = 0; i < num_problems; ++i) {
      const uint64_t seed = first_seed + i;
      Random random(seed);
      const auto gemm = MakeGemm(seed, RandomSizes(random), values);
      RunUnits(*PlanGemm(gemm->problem, static_cast<int>(Pick(random, 1, 5))), &random);
      const int64_t num_wrong = CountWrong(*gemm, values);
      if (num_wrong != 0) {
        check::Fail(__FILE__, __LINE__, isa, ", seed ", seed, ": ", num_wrong, " wrong");
      }
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

}  // namespace jax_ub

CHECK_MAIN()
