// Views of segmented matrices. An operand or result of a GEMM may be distributed over
// the buffers of several ranks, along either dimension. The GEMM reads and writes it in
// place.
//
// A view is a grid of rectangular segments. The `bounds` of a dimension contain the
// first index of every segment and, last, the size: {0, 3, 7} means rows 0..2 and rows
// 3..6. `segments` lists the grid in row-major order.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <string_view>
#include <vector>

#include "gemm/dtype.h"

namespace jax_ub {

constexpr int64_t SizeOf(DType dtype) { return InfoOf(dtype).size_bytes; }

constexpr std::string_view DTypeName(DType dtype) { return InfoOf(dtype).name; }

// A rectangle of an operand in one buffer, for reading. Strides are in elements. At
// least one of them is 1.
struct ConstSegment {
  const std::byte* data = nullptr;
  int64_t outer_stride = 0;
  int64_t inner_stride = 0;
};

// The scales of a segment's elements, f32 or e8m0. Each is a power of two, or NaN.
// Element (o, k) of the segment has the scale data[o / outer_block * outer_stride + k /
// inner_block * inner_stride].
struct ScaleSegment {
  const std::byte* data = nullptr;
  int64_t outer_block = 1;
  int64_t outer_stride = 0;
  int64_t inner_block = 1;
  int64_t inner_stride = 0;
};

// An operand of a GEMM, A [M, K] or B [K, N], in any layout. The `inner` dimension is
// the contracted dimension K; the `outer` dimension is M for A and N for B.
struct OperandView {
  DType dtype = DType::kF32;
  std::vector<int64_t> outer_bounds;
  std::vector<int64_t> inner_bounds;
  std::vector<ConstSegment> segments;     // [outer segment][inner segment]
  DType scale_dtype = DType::kE8M0;       // of `scales`
  std::vector<ScaleSegment> scales = {};  // parallel to `segments`; empty: none
};

inline bool IsContiguousAlongK(const OperandView& view) {
  return std::all_of(view.segments.begin(), view.segments.end(),
                     [](const ConstSegment& s) { return s.inner_stride == 1; });
}

struct Segment {
  std::byte* data = nullptr;
  int64_t row_stride = 0;  // in elements; columns are contiguous
};

// The result C [M, N]. Every element is stored in `num_replicas` places: an all-reduce
// stores a replica for each rank.
struct ResultView {
  DType dtype = DType::kF32;
  int num_replicas = 1;
  std::vector<int64_t> row_bounds;
  std::vector<int64_t> column_bounds;
  std::vector<Segment> segments;  // [replica][row segment][column segment]
};

// A segment of an addend, which is added to the f32 sum before the sum is rounded. An
// addend has the same segments as the result, and may be in the memory of the result. A
// bias has row_stride 0.
struct AddendSegment {
  const std::byte* data = nullptr;
  int64_t row_stride = 0;
};

struct AddendView {
  DType dtype = DType::kF32;
  std::vector<AddendSegment> segments;  // parallel to ResultView::segments
};

// The f32 factors of a segment's sums, such as the scales of FP8 operands. With stride
// 0, all rows or columns have the same factor. The column stride is 0 or 1.
struct FactorSegment {
  const float* data = nullptr;
  int64_t row_stride = 0;
  int64_t column_stride = 0;

  bool is_one() const { return row_stride == 0 && column_stride == 0; }
};

struct FactorView {
  // The factors of each segment of the result: [row segment][column segment]. All
  // replicas have the same factors. With GemmProblem::has_factors_by_k, each segment of
  // A along K has different factors: [segment along K][row segment][column segment].
  std::vector<FactorSegment> segments;
};

}  // namespace jax_ub
