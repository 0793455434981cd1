// Stores finished sums into the segments of the result, with what is added to it.
#pragma once

#include <cstdint>

#include "gemm/cpu/kernels.h"
#include "gemm/cpu/operand.h"
#include "gemm/gemm.h"
#include "gemm/views.h"

namespace jax_ub {

class ResultWriter {
 public:
  // Both outlive the result.
  ResultWriter(const GemmProblem& problem, const KernelSet& kernels);

  // result[r, c] = round(scale * sums[r, c] + addends[r, c]) in every replica, or in the
  // first one if the others are copies. `sums` holds the rectangle's rows at a distance of
  // `sums_stride` elements, and is scaled.
  void Store(float* sums, int64_t sums_stride, Range rows, Range columns) const;

  // Copies the first replica to the others, if they are its copies.
  void CopyReplicas(Range rows, Range columns) const;

  // Whether Store wants whole rows of a unit at once, not one tile after the other: short
  // pieces of many replicas take longer.
  bool stores_rows() const { return view_.num_replicas > 1 && !are_copies_; }

  // Whether a kernel may store the rectangle itself, as it lies in one segment; then
  // `output` says where it goes, and with what it is added up.
  bool FindOutput(Range rows, Range columns, TileOutput& output) const;

  // Asks for the memory that Store will read and write, as far as it lies in the segment
  // where the rectangle begins. Only a hint.
  void Prefetch(Range rows, Range columns) const;

 private:
  // What lies of a rectangle in one segment. Ranges are within the segment.
  struct SegmentBlock {
    int64_t segment;
    Range rows;
    Range columns;
  };

  struct BytesAt {
    std::byte* data;
    int64_t row_stride;
  };

  // visit(piece, its first row and column within the rectangle) for all pieces.
  template <typename Visit>
  void ForEachSegmentBlock(Range rows, Range columns, const Visit& visit) const;
  void StoreSegmentBlock(const float* sums,
                         int64_t sums_stride,
                         const SegmentBlock& block) const;
  void CopySegmentBlock(const SegmentBlock& block) const;
  // Of the segment, and of a piece's memory, in one replica.
  int64_t IndexOf(int replica, const SegmentBlock& block) const;
  BytesAt Find(int replica, const SegmentBlock& block) const;

  const float scale_;
  const ResultView& view_;
  const std::vector<AddendView>& addends_;
  const KernelSet& kernels_;
  const int64_t num_row_segments_;
  const int64_t num_column_segments_;
  const bool are_copies_;   // the replicas, of the first one
  const bool is_streamed_;  // the copies go past the caches
  const bool is_plain_;     // stored once, unscaled, with an addend at most
};

}  // namespace jax_ub
