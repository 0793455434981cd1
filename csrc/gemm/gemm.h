// One matrix product over segmented operands, cut into units that any thread may run.
//
//   C[m, n] = round(scale * sum_k A[m, k] * B[k, n] + sum of addends[m, n])
//
// Products of bf16 and f16 operands are exact and summed in f32, in an order that
// depends on the views and the instruction set only, never on threads: results are
// bitwise repeatable. Subnormal f32 numbers, also as values of bf16, count as zero:
// XLA:CPU runs its own arithmetic that way. Subnormal f16 numbers keep their value.
#pragma once

#include <cstdint>
#include <memory>
#include <string_view>
#include <vector>

#include "gemm/scratch.h"
#include "gemm/views.h"

namespace jax_ub {

// No operation has more than a bias, a residual and an accumulator.
inline constexpr int kMaxAddends = 7;

struct GemmProblem {
  int64_t m = 0;
  int64_t n = 0;
  int64_t k = 0;
  float scale = 1;
  OperandView a;  // [M, K], outer = M
  OperandView b;  // [K, N], outer = N
  ResultView c;   // [M, N]
  std::vector<AddendView> addends;
};

// How a problem is computed. Units are independent: each writes its own part of C, any
// thread may run any unit in any order, and Run never waits for another thread.
// The workspace is bounded (a few MiB per thread), whatever the problem's size.
class GemmPlan {
 public:
  virtual ~GemmPlan() = default;
  virtual int64_t num_units() const = 0;
  virtual void Run(int64_t unit, Scratch& scratch) const = 0;
};

class BlockingCache;

// The threads that share the units of a product, and the blockings that they keep from
// one product to the next, if they keep any.
struct Workers {
  Workers(int count, BlockingCache* blocking_cache = nullptr)  // NOLINT: implicit
      : num(count), blockings(blocking_cache) {}

  int num;
  BlockingCache* blockings;
};

// Plans for these workers on the instruction set in use. Throws std::invalid_argument
// where views and sizes disagree.
std::unique_ptr<GemmPlan> PlanGemm(GemmProblem problem, const Workers& workers);

// How long one thread takes on the instruction set in use, in microseconds. Rough.
double EstimateGemmUs(const GemmProblem& problem);

// Instruction sets that have kernels, slowest first: "portable", "avx2", "avx512",
// "avx512_bf16", "amx_bf16". SetIsa may only choose one that this machine has; throws
// otherwise.
std::vector<std::string_view> AvailableIsas();
std::string_view CurrentIsa();
void SetIsa(std::string_view name);

}  // namespace jax_ub
