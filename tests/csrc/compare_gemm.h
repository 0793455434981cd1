// Runs random problems and counts elements that are not what they have to be.
#pragma once

#include <numeric>

#include "check.h"
#include "gemm/cpu/plan.h"
#include "random_gemm.h"

namespace jax_ub {

inline void RunUnits(const GemmPlan& plan, Random* order = nullptr) {
  std::vector<int64_t> units(plan.num_units());
  std::iota(units.begin(), units.end(), 0);
  if (order != nullptr) std::shuffle(units.begin(), units.end(), *order);
  Scratch scratch;
  for (int64_t unit : units) plan.Run(unit, scratch);
}

inline GemmSizes RandomSizes(Random& random) {
  const int64_t kind = Pick(random, 0, 9);
  const int64_t large = kind < 7 ? 70 : 300;
  return {.m = Pick(random, 1, kind == 0 ? 4 : large),
          .n = Pick(random, 1, kind == 1 ? 4 : large),
          .k = Pick(random, 0,
                    kind == 2  ? 4
                    : kind < 8 ? 90
                               : 1100),
          .max_parts = Pick(random, 1, 5)};
}

// Half a unit in the last place, relative to the number: what rounding may change.
inline double RoundingError(DType dtype) {
  if (dtype == DType::kF32) return std::ldexp(1.0, -24);
  return std::ldexp(1.0, dtype == DType::kBF16 ? -8 : -11);
}

inline int64_t CountWrong(const RandomGemm& gemm, Values values) {
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

// Problem number `seed` on a kernel set, in a random order of units.
inline void CompareOne(uint64_t seed, Values values, const Isa& isa) {
  Random random(seed);
  const auto gemm = MakeGemm(seed, RandomSizes(random), values);
  const GemmProblem& problem = gemm->problem;
  const KernelSet& kernels = KernelsFor(isa, problem.a.dtype, problem.b.dtype);
  const int num_workers = static_cast<int>(Pick(random, 1, 5));
  RunUnits(*PlanCpuGemm(problem, kernels, num_workers), &random);
  const int64_t num_wrong = CountWrong(*gemm, values);
  if (num_wrong != 0) {
    check::Fail(__FILE__, __LINE__, kernels.isa, ", seed ", seed, ": ", num_wrong,
                " wrong");
  }
}

}  // namespace jax_ub
