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

// Returns a view whose outer dimension is the rows and whose inner dimension is the
// features. Used for x in y = x w, where the features are contracted, and for results.
inline StridedPointer RowsOf(const Tensor& tensor, int64_t batch, int64_t row) {
  return {tensor.At(batch, row), tensor.features, 1};
}

// Returns a view whose outer dimension is the features and whose inner dimension is the
// rows. Used for x and dy in dw = x^T dy, where the rows (tokens) are contracted.
inline StridedPointer ColumnsOf(const Tensor& tensor, int64_t batch, int64_t row) {
  return {tensor.At(batch, row), 1, tensor.features};
}

// Returns a view of a kernel [in, out], or [out, in] if `transposed`, in which `in` is
// contracted.
inline StridedPointer KernelOf(const Tensor& kernel, bool transposed) {
  return transposed ? RowsOf(kernel, 0, 0) : ColumnsOf(kernel, 0, 0);
}

// Returns the scales of an operand, or nullptr.
inline const Tensor* ScalesOf(const RankCall& call, size_t operand) {
  return call.scales.empty() ? nullptr : &call.scales[operand];
}

// Returns whether the scales of an operand multiply its elements, because they change
// along the contracted dimension. Other scales multiply the sums. `contracts_rows` says
// whether the contracted dimension is the rows of the operand.
inline bool ScalesElements(const CallAttributes& at,
                           const Tensor& scales,
                           bool contracts_rows) {
  if (!at.has_row_scales) return false;
  if (scales.dtype != DType::kF32 || InfoOf(at.op).gemm == GemmKind::kWgrad)
    return true;
  return (contracts_rows ? scales.rows : scales.features) > 1;
}

// Returns the scales of the elements of a segment that begins at this row of `operand`.
inline ScaleSegment ElementScales(const Tensor& scales,
                                  const Tensor& operand,
                                  int64_t batch,
                                  int64_t row,
                                  bool contracts_rows) {
  const int64_t row_block = operand.rows / scales.rows;
  const int64_t feature_block = operand.features / scales.features;
  const std::byte* data = scales.At(batch, row / row_block);
  if (contracts_rows) return {data, feature_block, 1, row_block, scales.features};
  return {data, row_block, scales.features, feature_block, 1};
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
  // Appends the scales of the segment that was appended last, if they multiply its
  // elements (ScalesElements). The segment begins at (batch, row) of `operand`.
  // `scales` is null if the operand has no scales.
  void AppendScales(const CallAttributes& at,
                    const Tensor* scales,
                    const Tensor& operand,
                    int64_t batch,
                    int64_t row,
                    bool contracts_rows) {
    if (scales == nullptr || !ScalesElements(at, *scales, contracts_rows)) return;
    view_.scale_dtype = scales->dtype;
    view_.scales.push_back(ElementScales(*scales, operand, batch, row, contracts_rows));
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

inline constexpr float kOne = 1;

// Returns one operand's scales as factors of the rows (`is_of_rows`) or columns of the
// result, beginning with scale `first` along the dimension that is not contracted.
// Returns 1 if the scales multiply the elements instead.
inline FactorSegment FactorOf(const CallAttributes& at,
                              const Tensor& scales,
                              int64_t first,
                              bool contracts_rows,
                              bool is_of_rows) {
  if (ScalesElements(at, scales, contracts_rows)) return {&kOne, 0, 0};
  const auto* const data = reinterpret_cast<const float*>(scales.data);
  const int64_t stride = scales.num_elements() > 1;
  return {data + first * stride, is_of_rows ? stride : 0, is_of_rows ? 0 : stride};
}

// Adds the scales of FP8 operands to `problem` as factors of its sums. of_rows(part, i)
// returns the factors of row segment i of the result, of_columns(part, j) those of
// column segment j. If num_parts > 1, `part` is a segment along K, whose sums have
// their own factors.
template <typename OfRows, typename OfColumns>
void AddFactors(const CallAttributes& at,
                int num_parts,
                const OfRows& of_rows,
                const OfColumns& of_columns,
                GemmProblem& problem) {
  if (!at.has_scales) return;
  FactorView rows, columns;
  bool is_one = true;
  for (int part = 0; part < num_parts; ++part) {
    for (size_t i = 0; i + 1 < problem.c.row_bounds.size(); ++i) {
      for (size_t j = 0; j + 1 < problem.c.column_bounds.size(); ++j) {
        rows.segments.push_back(of_rows(part, i));
        columns.segments.push_back(of_columns(part, j));
        is_one &=
            rows.segments.back().data == &kOne && columns.segments.back().data == &kOne;
      }
    }
  }
  if (is_one) return;
  problem.factors = {std::move(rows), std::move(columns)};
  problem.has_factors_by_k = num_parts > 1;
}

}  // namespace jax_ub
