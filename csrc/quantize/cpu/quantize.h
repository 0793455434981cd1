// Quantizes an array to FP8 in two passes: one computes the largest absolute values
// (amaxes) of the elements that share a scale, the other divides elements by scales.
// A pass consists of units, which threads may run in any order.
#pragma once

#include <cstddef>
#include <cstdint>

#include "gemm/dtype.h"

namespace jax_ub {

// How elements share scales. The array is [groups][rows][columns], in row-major order.
// With `per_column`, there is one scale for each column of a group, otherwise one for
// each group. So one scale per tensor is one group, one scale per row or per block of
// a row is one group for each, and one scale per column is one group `per_column`.
struct ScaleLayout {
  int64_t groups = 1;
  int64_t rows = 1;
  int64_t columns = 1;
  bool per_column = false;

  int64_t num_elements() const { return groups * rows * columns; }
  int64_t num_scales() const { return per_column ? groups * columns : groups; }
};

// The units of a pass. A unit consists of several whole groups, or of some columns of
// one group.
class QuantizeUnits {
 public:
  explicit QuantizeUnits(const ScaleLayout& layout);

  int64_t count() const { return num_units_; }
  // Returns the approximate run time of all units on one thread.
  double estimated_us() const;
  // Returns whether several units share a scale.
  bool share_scales() const { return slices_ > 1 && !layout_.per_column; }

  // Calls function(element, num_elements, scale) for each row of a unit. The elements
  // are consecutive. `scale` is the index of the first one's scale.
  template <typename Function>
  void ForEachRow(int64_t unit, const Function& function) const;

 private:
  ScaleLayout layout_;
  int64_t groups_per_unit_ = 1;
  int64_t slices_ = 1;  // slices of the columns of a group
  int64_t slice_columns_;
  int64_t num_units_;
};

// Computes the amax of the elements that share a scale.
struct AmaxPass {
  ScaleLayout layout;
  DType dtype;  // f32, bf16 or f16
  const void* x;
  // Whether the amax of elements with a NaN is NaN. Otherwise it is infinite.
  bool keeps_nan;
  int32_t* maxima;  // the bits of f32 numbers

  // Sets the maxima to zero. Must be called before the first unit runs.
  void Begin() const;
  void RunUnit(const QuantizeUnits& units, int64_t unit) const;
};

// Divides elements by their scales, in f32, clips the quotients to the range of an FP8
// dtype, and rounds them once, to nearest even. A NaN stays a NaN.
struct CastPass {
  ScaleLayout layout;
  DType dtype;  // f32, bf16 or f16
  const void* x;
  DType scale_dtype;  // f32 or e8m0
  const void* scales;
  DType fp8_dtype;  // e4m3 or e5m2
  void* values;

  void RunUnit(const QuantizeUnits& units, int64_t unit) const;
};

}  // namespace jax_ub
