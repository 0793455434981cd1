// Reads an operand from its segments: in place if the micro-kernel supports that,
// otherwise by packing it into panels of words. Packing gathers the segments and widens
// elements to f32.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "gemm/cpu/kernels.h"
#include "gemm/views.h"

namespace jax_ub {

// A half-open range of indices, [begin, end).
struct Range {
  int64_t begin = 0;
  int64_t end = 0;
  int64_t size() const { return end - begin; }
};

constexpr int64_t CeilDiv(int64_t a, int64_t b) { return (a + b - 1) / b; }
constexpr int64_t RoundUp(int64_t a, int64_t b) { return CeilDiv(a, b) * b; }

// One tile of A, packed or in place, in a layout that a TileFunction reads.
struct ATile {
  const void* words;
  int64_t stride;  // in bytes
};

class OperandReader {
 public:
  // `panel` is the number of columns of a panel: panel_of_a for A, tile_columns for B.
  // All arguments that are references must outlive the reader.
  OperandReader(const OperandView& view,
                const KernelSet& kernels,
                const PanelPackers& packers,
                int panel);

  bool is_k_contiguous() const { return is_k_contiguous_; }

  // Returns whether ReadRows reads tiles of A. This requires that every segment is
  // contiguous along K, and that the kernels are fast with rows that are read in place.
  bool reads_rows() const { return kernels_.reads_a_in_place && is_k_contiguous_; }

  // Returns whether tiles of A consist of rows that are contiguous along K, in place or
  // packed.
  bool has_rows() const { return reads_rows() || panel_ == 1; }

  // Returns the tile of A that PackPanels has written to `panels`, for `k` elements of
  // K.
  ATile PackedTile(const std::byte* panels, int64_t k) const {
    return {panels, panel_ == 1 ? PanelBytes(k) : int64_t{4} * panel_};
  }

  // Returns the distance in bytes between neighboring panels that have `k` elements of
  // K.
  int64_t PanelBytes(int64_t k) const;

  // Packs the block `outer` x `k` into consecutive panels. With p = panel width, word
  // (o, k) goes to panels + o / p * PanelBytes + 4 * (k * p + o % p). If the last panel
  // is not full, its remaining words are not written.
  void PackPanels(Range outer, Range k, std::byte* panels) const;

  // Sets `panel.source` to the block `outer` x `k` of the operand, so that the tile
  // kernel packs the block while it multiplies. Does nothing unless the block is within
  // one segment of the operand and contiguous along the outer dimension.
  void FindSource(Range outer, Range k, BPanel& panel) const;

  // Returns a cursor that prefetches the block `outer` x `k`, which will be packed
  // next, in `num_steps` steps. Covers only the segment in which the block begins,
  // because prefetching is just a hint.
  PrefetchCursor LinesOf(Range outer, Range k, int64_t num_steps) const;

  // Returns a tile of rows. Requires reads_rows(). If one segment contains the tile and
  // its elements need no conversion, the tile is in place. Otherwise it is copied to
  // `rows`.
  ATile ReadRows(Range outer, Range k, std::byte* rows) const;

 private:
  int64_t NumWords(int64_t k) const {
    return (k + kernels_.k_per_word - 1) / kernels_.k_per_word;
  }
  // SegmentAt returns segment (i, j). AddressAt returns the address of element (outer,
  // k), which must be in this segment.
  const ConstSegment& SegmentAt(int64_t i, int64_t j) const;
  const std::byte* AddressAt(int64_t i, int64_t j, int64_t outer, int64_t k) const;
  // Packs the block `outer` x `k`, whose rows are all in segments with index
  // `outer_segment` along the outer dimension. The first panel begins at row
  // `first_outer`.
  void PackOuterSegment(int64_t outer_segment,
                        Range outer,
                        int64_t first_outer,
                        Range k,
                        std::byte* panels) const;
  // Packs a block that is within one segment and begins at `source`. `outer` and `k`
  // are relative to the first element of the panels.
  void PackSegment(const ConstSegment& segment,
                   const std::byte* source,
                   Range outer,
                   Range k,
                   std::byte* panels,
                   int64_t panel_bytes) const;
  // Multiplies the packed elements in the rectangle `outer` x `k` of the panels by
  // their scales. All these elements come from one segment of the operand: `segment` is
  // its index, and (outer_begin, k_begin) its first element. Positions are relative to
  // the first element of the panels.
  void ScaleSegmentPart(int64_t segment,
                        int64_t outer_begin,
                        int64_t k_begin,
                        Range outer,
                        Range k,
                        std::byte* panels,
                        int64_t panel_width,
                        int64_t panel_bytes) const;
  class ScaleReader;
  // Multiplies columns of one packed panel by their scales. Returns true if a scale is
  // 2^-127. Such a scale takes two multiplications, so the caller must then call this
  // function a second time, with `halves` (see ScaleReader::Copy).
  //
  // `words` is the first of the columns. `outer` is relative to the segment. `k` and
  // `k_begin`, the first index of the segment, are relative to the panel.
  bool ScaleColumns(const ScaleReader& scales,
                    Range outer,
                    Range k,
                    int64_t k_begin,
                    std::byte* words,
                    int64_t panel_width,
                    bool halves) const;

  const OperandView& view_;
  const KernelSet& kernels_;
  const PanelPackers& packers_;
  const int panel_;
  const WidenFunction widen_;
  const int64_t element_bytes_;
  const bool is_k_contiguous_;  // whether every segment is contiguous along K
};

// Returns the number of the segment that contains the row or column `index`. `bounds`
// has the first index of each segment and, last, the size.
inline int64_t FindSegment(const std::vector<int64_t>& bounds, int64_t index) {
  if (bounds.size() == 2)
    return 0;  // the most frequent case, on the path of every tile
  return std::upper_bound(bounds.begin(), bounds.end(), index) - bounds.begin() - 1;
}

}  // namespace jax_ub
