// Builds the views of GEMM operands and results, which consist of segments of tensors.
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

// Returns a view of a tensor that begins at row `row` of a batch element. Its outer
// dimension is the rows, and its inner dimension is the features. Used for results, and
// for x in y = x w, which contracts the features.
inline StridedPointer RowsOf(const Tensor& tensor, int64_t batch, int64_t row) {
  return {tensor.At(batch, row), tensor.features, 1};
}

// Returns a view of a tensor that begins at row `row` of a batch element. Its outer
// dimension is the features, and its inner dimension is the rows. Used for x and dy in
// dw = x^T dy, which contracts the rows (tokens).
inline StridedPointer ColumnsOf(const Tensor& tensor, int64_t batch, int64_t row) {
  return {tensor.At(batch, row), 1, tensor.features};
}

// Returns a view of a kernel of shape [in, out], or [out, in] if `transposed`. The
// inner dimension of the view is `in`, the contracted dimension.
inline StridedPointer KernelOf(const Tensor& kernel, bool transposed) {
  return transposed ? RowsOf(kernel, 0, 0) : ColumnsOf(kernel, 0, 0);
}

// Returns the FP8 scales of an operand, or nullptr if the call has none.
inline const Tensor* ScalesOf(const RankCall& call, size_t operand) {
  return call.scales.empty() ? nullptr : &call.scales[operand];
}

// Returns whether the scales must multiply the elements of an operand, because they
// vary along the contracted dimension. Other scales multiply the sums of the GEMM.
// `contracts_rows` says whether the contracted dimension is the rows of the operand.
inline bool ScalesElements(const CallAttributes& at,
                           const Tensor& scales,
                           bool contracts_rows) {
  if (!at.has_row_scales) return false;
  if (scales.dtype != DType::kF32 || InfoOf(at.op).gemm == GemmKind::kWgrad)
    return true;
  return (contracts_rows ? scales.rows : scales.features) > 1;
}

// Returns a view of the FP8 scales that multiply the elements of `operand`, from row
// `row` of batch element `batch` on. `contracts_rows` says whether the GEMM sums over
// the rows of the operand.
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

inline constexpr float kOne = 1;

// Builds an OperandView, a GEMM operand that consists of segments in separate buffers.
// The caller adds the sizes in the order of the segments, and appends the segments in
// row-major order: [outer segment][inner segment].
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
  // Appends the scales of the segment that was appended last. The scales are 1 if those
  // of the segment do not multiply elements (ScalesElements). Does nothing if `scales`
  // is null. The segment begins at row `row` of batch element `batch` of `operand`.
  void AppendScales(const CallAttributes& at,
                    const Tensor* scales,
                    const Tensor& operand,
                    int64_t batch,
                    int64_t row,
                    bool contracts_rows) {
    if (scales == nullptr) return;
    if (!ScalesElements(at, *scales, contracts_rows)) {
      view_.scales.push_back({reinterpret_cast<const std::byte*>(&kOne)});
      return;
    }
    scales_elements_ = true;
    view_.scale_dtype = scales->dtype;
    view_.scales.push_back(ElementScales(*scales, operand, batch, row, contracts_rows));
  }
  // Returns the operand, which has no scales if those of no segment multiply elements.
  OperandView Take() {
    if (!scales_elements_) view_.scales.clear();
    return std::move(view_);
  }

 private:
  OperandView view_;
  bool scales_elements_ = false;
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

// Returns the scales of an operand, from index `first` on, as factors of the sums of a
// GEMM. If `is_of_rows`, the factors belong to the rows of the result, otherwise to its
// columns. Returns a factor of 1 if the scales multiply elements instead
// (ScalesElements).
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

// Makes the GEMM multiply its sums by the scales of its FP8 operands. of_rows(part, i)
// returns the factors of the rows in row segment i of the result. of_columns(part, j)
// returns the factors of the columns in column segment j. If num_parts > 1, each
// segment `part` along K has its own factors.
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
