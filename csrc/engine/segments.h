// Builds the segmented views of GEMM operands and results from tensors.
#pragma once

#include <cstddef>
#include <cstdint>
#include <utility>

#include "engine/call.h"
#include "gemm/gemm.h"

namespace jax_ub {

// The address of a segment's first element, and its strides in elements.
struct StridedPointer {
  std::byte* data = nullptr;
  int64_t outer_stride = 0;
  int64_t inner_stride = 0;
};

// Returns a view with the rows as the outer dimension and the features contracted: x in
// y = x w, and any result.
inline StridedPointer RowsOf(const Tensor& tensor, int64_t batch, int64_t row) {
  return {tensor.At(batch, row), tensor.features, 1};
}

// Returns a view with the features as the outer dimension and the rows (tokens)
// contracted: both operands of dw = x^T dy.
inline StridedPointer ColumnsOf(const Tensor& tensor, int64_t batch, int64_t row) {
  return {tensor.At(batch, row), 1, tensor.features};
}

// Returns a view of a kernel [in, out], or [out, in] if `transposed`, in which `in` is
// contracted.
inline StridedPointer KernelOf(const Tensor& kernel, bool transposed) {
  return transposed ? RowsOf(kernel, 0, 0) : ColumnsOf(kernel, 0, 0);
}

// Builds an OperandView. Add the sizes in the order of the segments, and append the
// segments row-major: [outer segment][inner segment].
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

// Multiplies the sums of a product by the scales of its FP8 operands. Each function
// returns the scale of the segment with this index along the rows or columns of the
// result.
template <typename OfRows, typename OfColumns>
void AddFactors(const CallAttributes& at,
                const OfRows& scale_of_rows,
                const OfColumns& scale_of_columns,
                GemmProblem& problem) {
  if (!at.has_scales) return;
  const auto factor = [](const Tensor& scale) {
    return FactorSegment{reinterpret_cast<const float*>(scale.data), 0, 0};
  };
  FactorView of_rows, of_columns;
  for (size_t i = 0; i + 1 < problem.c.row_bounds.size(); ++i) {
    for (size_t j = 0; j + 1 < problem.c.column_bounds.size(); ++j) {
      of_rows.segments.push_back(factor(scale_of_rows(i)));
      of_columns.segments.push_back(factor(scale_of_columns(j)));
    }
  }
  problem.factors = {std::move(of_rows), std::move(of_columns)};
}

// As above, for a product whose columns all have scale number `second` of a call.
inline void AddFactors(const CallAttributes& at,
                       const RankCall& call,
                       int second,
                       GemmProblem& problem) {
  const auto scale = [&](int index) {
    return [&call, index](size_t) -> const Tensor& { return call.scales[index]; };
  };
  AddFactors(at, scale(0), scale(second), problem);
}

}  // namespace jax_ub
