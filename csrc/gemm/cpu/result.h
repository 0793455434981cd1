// Stores finished sums in the segments of the result, after adding the addends.
#pragma once

#include <cstdint>
#include <optional>

#include "gemm/cpu/kernels.h"
#include "gemm/cpu/operand.h"
#include "gemm/gemm.h"
#include "gemm/views.h"

namespace jax_ub {

class ResultWriter {
 public:
  // Both arguments must outlive the writer.
  ResultWriter(const GemmProblem& problem, const KernelSet& kernels);

  // Stores result[r, c] = round(scale * sums[r, c] + addends[r, c]). Stores it in all
  // replicas, or only in the first replica if CopyReplicas copies it to the others.
  // Rows of `sums` are `sums_stride` elements apart. `sums` are multiplied in place by
  // the scale and the factors.
  void Store(float* sums, int64_t sums_stride, Range rows, Range columns) const;

  // Returns whether each segment of A along K has its own factors. If so, Scale must be
  // called for each segment, and Store multiplies by no factors.
  bool has_factors_by_k() const { return has_factors_by_k_; }
  // Multiplies sums over segment `k_segment` of A in place by the scale and the factors
  // of this segment.
  void Scale(int64_t k_segment,
             float* sums,
             int64_t sums_stride,
             Range rows,
             Range columns) const;

  // Copies a rectangle of the result from its first replica to all other replicas. Does
  // nothing if there are addends, because Store has then written all replicas.
  void CopyReplicas(Range rows, Range columns) const;

  // Returns whether the caller should collect the tiles of a work unit and store whole
  // rows. It is slow to store the short rows of single tiles to several replicas.
  bool stores_rows() const { return view_.num_replicas > 1 && !are_copies_; }

  // Returns whether a tile kernel can store this rectangle itself. The rectangle must
  // be within one segment and be stored once. It may have at most one addend or,
  // without addends, a single factor for all its sums. If so, sets the destination, the
  // addend and the factor in `output`.
  bool FindOutput(Range rows, Range columns, TileOutput& output) const;

  // Prefetches the memory that Store will access. Covers only the segment in which the
  // rectangle begins, because prefetching is just a hint.
  void Prefetch(Range rows, Range columns) const;

 private:
  // The intersection of a rectangle with one segment, in indices relative to the
  // segment.
  struct SegmentBlock {
    int64_t segment;
    Range rows;
    Range columns;
  };

  struct BytesAt {
    std::byte* data;
    int64_t row_stride;
  };

  // Calls visit(block, row, column) for each intersection `block` of the rectangle with
  // a segment. (row, column) is the first element of the block, relative to the
  // rectangle.
  template <typename Visit>
  void ForEachSegmentBlock(Range rows, Range columns, const Visit& visit) const;
  // Returns the product of the scale and all factors of a segment, so that each sum is
  // multiplied only once. Returns nullopt if a factor differs between rows or columns,
  // or if f32 cannot represent the product as a normal number.
  std::optional<float> FindFactor(int64_t segment) const;
  // Multiplies the sums of a block in place by scale_ and factors_. `first` is the
  // index in FactorView::segments at which the current segment along K begins.
  void ScaleSegmentBlock(int64_t first,
                         float* sums,
                         int64_t sums_stride,
                         const SegmentBlock& block) const;
  void StoreSegmentBlock(const float* sums,
                         int64_t sums_stride,
                         const SegmentBlock& block) const;
  // Returns the index of a block's segment in ResultView::segments: [replica][row
  // segment][column segment]. A replica is one of the places where C is stored.
  int64_t IndexOf(int replica, const SegmentBlock& block) const;
  BytesAt Find(int replica, const SegmentBlock& block) const;

  const float scale_;
  const ResultView& view_;
  const std::vector<AddendView>& addends_;
  const std::vector<FactorView>& factors_;
  const KernelSet& kernels_;
  const int64_t num_row_segments_;
  const int64_t num_column_segments_;
  const bool are_copies_;   // CopyReplicas copies replicas 1, 2, ... from replica 0
  const bool is_streamed_;  // CopyReplicas uses non-temporal stores
  const bool has_factors_by_k_;
  const bool is_scaled_;  // Store multiplies by factors, or by a scale that is not 1
  const bool is_plain_;   // one store per element, at most one addend or a scale
};

}  // namespace jax_ub
