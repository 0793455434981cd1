// Views of matrices that lie in pieces: any operand or result of a GEMM may be spread
// over the buffers of several ranks, along either dimension, and is used in place.
//
// A view is a grid of rectangular segments. `bounds` of a dimension hold where its
// segments begin, then where the last one ends: {0, 3, 7} is rows 0..2 and rows 3..6.
// Segments are listed row-major over that grid.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string_view>
#include <vector>

#include "gemm/dtype.h"

namespace jax_ub {

constexpr int64_t SizeOf(DType dtype) { return dtype == DType::kF32 ? 4 : 2; }

constexpr std::string_view DTypeName(DType dtype) {
  constexpr std::string_view kNames[kNumDTypes] = {"f32", "bf16", "f16"};
  return kNames[static_cast<int>(dtype)];
}

// A read-only rectangle. Strides are in elements; one of them is 1.
struct ConstSegment {
  const std::byte* data = nullptr;
  int64_t outer_stride = 0;
  int64_t inner_stride = 0;
};

// An operand of a GEMM, A [M, K] or B [K, N]. `outer` is the dimension that survives the
// product (M of A, N of B), `inner` the contracted one (K), whatever the layout is.
struct OperandView {
  DType dtype = DType::kF32;
  std::vector<int64_t> outer_bounds;
  std::vector<int64_t> inner_bounds;
  std::vector<ConstSegment> segments;  // [outer segment][inner segment]
};

struct Segment {
  std::byte* data = nullptr;
  int64_t row_stride = 0;  // in elements; columns are contiguous
};

// The result C [M, N]. `num_replicas` > 1 stores every element that many times (an
// all-reduce: one copy per rank).
struct ResultView {
  DType dtype = DType::kF32;
  int num_replicas = 1;
  std::vector<int64_t> row_bounds;
  std::vector<int64_t> column_bounds;
  std::vector<Segment> segments;  // [replica][row segment][column segment]
};

// Added to the f32 sum before it is rounded, once. Lies in the same segments as the
// result; a bias has row_stride 0. An addend may be the result's own memory.
struct AddendSegment {
  const std::byte* data = nullptr;
  int64_t row_stride = 0;
};

struct AddendView {
  DType dtype = DType::kF32;
  std::vector<AddendSegment> segments;  // parallel to ResultView::segments
};

}  // namespace jax_ub
