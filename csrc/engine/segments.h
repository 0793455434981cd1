// Writes down which parts of which tensors are an operand or a result of a GEMM.
#pragma once

#include <cstdint>
#include <utility>

#include "engine/call.h"
#include "gemm/gemm.h"

namespace jax_ub {

// Where a segment begins in a tensor, and how to walk it.
struct StridedPointer {
  std::byte* data = nullptr;
  int64_t outer_stride = 0;
  int64_t inner_stride = 0;
};

// Rows survive the product, features are contracted: x of y = x w, and any result.
inline StridedPointer RowsOf(const Tensor& tensor, int64_t batch, int64_t row) {
  return {tensor.At(batch, row), tensor.features, 1};
}

// Features survive, rows (tokens) are contracted: both operands of dw = x^T dy.
inline StridedPointer ColumnsOf(const Tensor& tensor, int64_t batch, int64_t row) {
  return {tensor.At(batch, row), 1, tensor.features};
}

// A kernel [in, out], or [out, in] when transposed; `in` is contracted.
inline StridedPointer KernelOf(const Tensor& kernel, bool transposed) {
  return transposed ? RowsOf(kernel, 0, 0) : ColumnsOf(kernel, 0, 0);
}

// Sizes are added in the order of the segments; segments are appended row-major.
class OperandSegments {
 public:
  explicit OperandSegments(DType dtype) : view_{dtype, {0}, {0}, {}} {}

  void AddOuter(int64_t size) {
    view_.outer_bounds.push_back(view_.outer_bounds.back() + size);
  }
  void AddInner(int64_t size) {
    view_.inner_bounds.push_back(view_.inner_bounds.back() + size);
  }
  void Append(const StridedPointer& pointer) {
    view_.segments.push_back(
        {pointer.data, pointer.outer_stride, pointer.inner_stride});
  }
  OperandView Take() { return std::move(view_); }

 private:
  OperandView view_;
};

class ResultSegments {
 public:
  explicit ResultSegments(DType dtype, int num_replicas = 1)
      : view_{dtype, num_replicas, {0}, {0}, {}} {}

  void AddRows(int64_t size) {
    view_.row_bounds.push_back(view_.row_bounds.back() + size);
  }
  void AddColumns(int64_t size) {
    view_.column_bounds.push_back(view_.column_bounds.back() + size);
  }
  void Append(const StridedPointer& pointer) {
    view_.segments.push_back({pointer.data, pointer.outer_stride});
  }
  ResultView Take() { return std::move(view_); }

 private:
  ResultView view_;
};

inline GemmProblem Problem(float scale,
                           OperandSegments a,
                           OperandSegments b,
                           ResultSegments c) {
  GemmProblem problem;
  problem.scale = scale;
  problem.a = a.Take();
  problem.b = b.Take();
  problem.c = c.Take();
  problem.m = problem.c.row_bounds.back();
  problem.n = problem.c.column_bounds.back();
  problem.k = problem.a.inner_bounds.back();
  return problem;
}

}  // namespace jax_ub
