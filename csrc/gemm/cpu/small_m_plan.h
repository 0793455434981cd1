// Products with at most kMaxSmallM rows: units are strips of columns, B stays in place.
#pragma once

#include <cstdint>

#include "gemm/cpu/kernels.h"
#include "gemm/cpu/operand.h"
#include "gemm/cpu/result.h"
#include "gemm/gemm.h"

namespace jax_ub {

class SmallMPlan : public GemmPlan {
 public:
  SmallMPlan(GemmProblem problem, const KernelSet& kernels, int num_workers);

  int64_t num_units() const override;
  void Run(int64_t unit, Scratch& scratch) const override;

 private:
  // A as f32 rows of K.
  void WidenA(std::byte* rows) const;
  // sums[m, c] += A B for the part of the column block `columns` that one segment of B holds.
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
