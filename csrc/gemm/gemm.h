// GEMM over segmented operands, divided into independent units that any thread may run.
//
//   C[m, n] = round(scale * sum_k A[m, k] * B[k, n] + sum of addends[m, n])
//
// Products of bf16, f16 and FP8 operands are exact. They are summed in f32, in an order
// that depends only on the views and the instruction set, not on the number of threads,
// so results are bitwise reproducible. As in XLA:CPU, subnormal f32 and bf16 numbers
// are treated as zero. Subnormal f16 and FP8 numbers keep their value.
#pragma once

#include <cstdint>
#include <memory>
#include <string_view>
#include <vector>

#include "gemm/scratch.h"
#include "gemm/views.h"

namespace jax_ub {

// Maximum number of addends of a GEMM. Operations need three: a bias, a residual and an
// accumulator.
inline constexpr int kMaxAddends = 7;
// Maximum number of factors by which a sum is multiplied: the scales of both FP8
// operands.
inline constexpr int kMaxFactors = 2;

// A GEMM: C = round(scale * A * B * factors + sum of addends). Each sum is multiplied
// by `scale` and by the factors of its row and column: by their product or, if f32
// cannot represent the product as a normal number, by one after the other. With
// `has_factors_by_k`, each segment of A along K has its own factors, which multiply the
// sum over this segment.
//
// An FP8 operand may have scales. Its elements are multiplied by their scales and
// become bf16 numbers. This is exact, except that products below the smallest normal
// bf16 become zero.
struct GemmProblem {
  int64_t m = 0;
  int64_t n = 0;
  int64_t k = 0;
  float scale = 1;
  OperandView a;  // [M, K], outer = M
  OperandView b;  // [K, N], outer = N
  ResultView c;   // [M, N]
  std::vector<AddendView> addends;
  std::vector<FactorView> factors;  // read while the product runs
  bool has_factors_by_k = false;
};

// Throws std::invalid_argument if views and sizes of the problem do not match. The
// message has the actual and the expected values.
void CheckProblem(const GemmProblem& problem);

// A problem, divided into work units. Units are independent: each writes a different
// block of C, any thread may run any of them in any order, and Run never waits for
// another thread. A thread needs a workspace of a few MiB, whatever the size of the
// problem.
class GemmPlan {
 public:
  virtual ~GemmPlan() = default;
  virtual int64_t num_units() const = 0;
  virtual void Run(int64_t unit, Scratch& scratch) const = 0;
};

class BlockingCache;

// The number of threads that share the work units of a product, and a cache of
// divisions of products into units. Without a cache (null), each product is divided
// anew.
struct Workers {
  Workers(int count, BlockingCache* blocking_cache = nullptr)  // NOLINT: implicit
      : num(count), blockings(blocking_cache) {}

  int num;
  BlockingCache* blockings;
};

// Plans a product for these workers and the current instruction set. Throws
// std::invalid_argument if views and sizes do not match.
std::unique_ptr<GemmPlan> PlanGemm(GemmProblem problem, const Workers& workers);

// Returns a rough estimate of a product's run time on one thread with the current
// instruction set, in microseconds.
double EstimateGemmUs(const GemmProblem& problem);

// The instruction sets that have kernels are, oldest first: "portable", "avx2",
// "avx512", "avx512_vbmi", "avx512_bf16", "amx_bf16". AvailableIsas returns the
// instruction sets that this machine supports. The fastest of them is the default.
// SetIsa throws std::invalid_argument if the machine does not support `name`.
std::vector<std::string_view> AvailableIsas();
std::string_view CurrentIsa();
void SetIsa(std::string_view name);

}  // namespace jax_ub
