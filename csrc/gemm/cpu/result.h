// Stores finished sums into the segments of the result, with what is added to it.
#pragma once

#include <cstdint>

#include "gemm/cpu/kernels.h"
#include "gemm/cpu/operand.h"
#include "gemm/gemm.h"
#include "gemm/views.h"

namespace jax_ub {

class Result {
 public:
  // Both outlive the result.
  Result(const GemmProblem& problem, const KernelSet& kernels);

  // result[r, c] = round(scale * sums[r, c] + addends[r, c]) in every replica. `sums`
  // holds the rectangle's rows at a distance of `sums_stride` elements, and is scaled.
  void Store(float* sums, int64_t sums_stride, Range rows, Range columns) const;

  // Whether Store wants whole rows of a unit at once, not one tile after the other: short
  // pieces of many replicas take longer.
  bool stores_rows() const { return view_.num_replicas > 1; }

  // Whether a kernel may store the rectangle itself, as it lies in one segment; then
  // `output` says where it goes, and with what it is added up.
  bool FindOutput(Range rows, Range columns, TileOutput& output) const;

  // Asks for the memory that Store will read and write, as far as it lies in the segment
  // where the rectangle begins. Only a hint.
  void Prefetch(Range rows, Range columns) const;

 private:
  // The part that lies in one segment, in every replica. Ranges are within the segment.
  void StorePiece(const float* sums,
                  int64_t sums_stride,
                  int64_t segment,
                  Range rows,
                  Range columns) const;

  const float scale_;
  const ResultView& view_;
  const std::vector<AddendView>& addends_;
  const KernelSet& kernels_;
  const int64_t num_row_segments_;
  const int64_t num_column_segments_;
  const bool is_streamed_;  // replicas, but for the first
  const bool is_plain_;     // one replica, unscaled, with an addend at most
};

}  // namespace jax_ub
