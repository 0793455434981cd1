// The units of one collective call: matrix products, copies and sums, in one parallel job.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "engine/trace.h"
#include "gemm/gemm.h"
#include "reduce/reduce.h"

namespace jax_ub {

// A block of bytes that is copied as it is.
struct Copy {
  const std::byte* from = nullptr;
  std::byte* to = nullptr;
  int64_t size_bytes = 0;
};

// to[i] = round(sum of sources[i], in their order, in f32), the same in every `to`.
struct Sum {
  DType source_dtype = DType::kF32;
  DType to_dtype = DType::kF32;
  std::vector<const std::byte*> sources;
  std::vector<std::byte*> to;
  int64_t num_elements = 0;
};

// out[r, c] = round(sum of parts[r, c], in their order, in f32).
struct MatrixSum {
  std::vector<ConstMatrix> parts;
  Matrix out;
  int64_t rows = 0;
  int64_t columns = 0;
};

class WorkList {
 public:
  void Add(GemmProblem problem, const Workers& workers);
  void Add(Copy copy);
  void Add(const Sum& sum);
  void Add(const MatrixSum& matrix_sum);

  // Units are independent: any thread, any order.
  int64_t num_units() const;
  void Run(int64_t unit, Scratch& scratch) const;

  // Whose spans the units are, and of which step.
  void set_trace(const TraceContext& context, const Step& step) {
    trace_ = context;
    step_ = step;
  }

  // Rough, for one thread: only decides whether waking others is worth it.
  double estimated_us() const { return estimated_us_; }

 private:
  std::vector<std::unique_ptr<GemmPlan>> plans_;
  std::vector<int64_t> plan_ends_;  // plan i has units [ends[i - 1], ends[i])
  // Units behind those of the plans hold blocks [ends[i - 1], ends[i]) of these.
  std::vector<Copy> copies_;
  std::vector<size_t> copy_ends_;
  std::vector<Sum> sums_;
  std::vector<size_t> sum_ends_;
  std::vector<MatrixSum> matrix_sums_;  // a unit each
  int64_t copy_unit_bytes_ = 0;         // of the last unit
  int64_t sum_unit_elements_ = 0;
  double estimated_us_ = 0;
  TraceContext trace_;
  Step step_;
};

}  // namespace jax_ub
