// Runs random GEMM problems and counts the elements of results that exceed the
// tolerance.
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

// Returns the maximum relative error of rounding to the dtype: half a unit in the last
// place.
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
          // Every addition rounds once, relative to the partial sum, and the store
          // rounds once.
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

// Runs random problem number `seed` with a kernel set, with its units in random order.
// The operands have random dtypes unless `dtype` is given.
inline void CompareOne(uint64_t seed,
                       Values values,
                       const Isa& isa,
                       std::optional<OperandDTypes> operands = {}) {
  Random random(seed);
  const Scaling scaling = {.has_factors = seed % 2 == 0,
                           .has_factors_by_k = seed % 4 == 0,
                           .has_scales = seed % 5 < 3};
  const auto gemm = MakeGemm(seed, RandomSizes(random), values, operands, scaling);
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

// Runs every tile of up to `most_rows` rows, with every layout of both operands.
inline void CompareTails(const KernelSet& kernels,
                         int64_t most_rows,
                         const std::vector<int64_t>& depths,
                         OperandDTypes dtypes = DType::kBF16) {
  for (int64_t m = 1; m <= most_rows; ++m) {
    for (int64_t k : depths) {
      for (int layout = 0; layout < 4; ++layout) {
        Random random(m * 1000 + k * 10 + layout);
        auto gemm = std::make_unique<RandomGemm>();
        GemmProblem& problem = gemm->problem;
        problem.m = m;
        problem.n = 60 + m;
        problem.k = k;
        RandomOperand operands[2];
        for (int i = 0; i < 2; ++i) {
          const int64_t outer = i == 0 ? problem.m : problem.n;
          do {
            operands[i] =
                MakeOperand(random, gemm->buffers, outer, k,
                            i == 0 ? dtypes.a : dtypes.b, Values::kIntegers, 1);
          } while (outer > 1 && k > 1 &&
                   (operands[i].view.segments[0].inner_stride == 1) !=
                       (layout >> i & 1));
        }
        problem.a = operands[0].view;
        problem.b = operands[1].view;
        AddResult(random, *gemm, {m, problem.n, k, 1}, DType::kF32);
        std::vector<double> product(m * problem.n);
        for (int64_t i = 0; i < m * problem.n; ++i) {
          for (int64_t j = 0; j < k; ++j) {
            product[i] += double{operands[0].dense[i / problem.n * k + j]} *
                          operands[1].dense[i % problem.n * k + j];
          }
        }
        gemm->expected.assign(problem.c.num_replicas, product);
        RunUnits(*PlanCpuGemm(problem, kernels, 1));
        CHECK_EQ(CountWrong(*gemm, Values::kIntegers), 0);
      }
    }
  }
}

}  // namespace jax_ub
