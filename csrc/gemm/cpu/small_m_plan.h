// The plan of products with few rows of A. A work unit is a block of columns. B is read
// in place.
#pragma once

#include <cstdint>

#include "gemm/cpu/kernels.h"
#include "gemm/cpu/operand.h"
#include "gemm/cpu/result.h"
#include "gemm/gemm.h"

namespace jax_ub {

class SmallMPlan : public GemmPlan {
 public:
  // Returns whether a SmallMPlan can compute the product. The kernel set must have
  // kernels for this number of rows (at least 1), and for the dtype and the layout of
  // B. The product must have neither scales of elements nor factors of its segments
  // along K.
  static bool Supports(const GemmProblem& problem, const KernelSet& kernels);

  SmallMPlan(GemmProblem problem, const KernelSet& kernels, int num_workers);

  int64_t num_units() const override;
  void Run(int64_t unit, Scratch& scratch) const override;

 private:
  // Converts A to f32 and stores it in `rows`, each row with K elements.
  void WidenA(std::byte* rows) const;
  // Adds the product of A and one segment of B to `sums`, for those columns of the
  // segment that are in `columns`.
  void AddSegment(int64_t column_segment,
                  int64_t k_segment,
                  Range columns,
                  const std::byte* a,
                  std::byte* sums) const;

  const GemmProblem problem_;
  const KernelSet& kernels_;
  const ResultWriter c_;
  const int64_t column_block_;  // columns of a unit
};

}  // namespace jax_ub
