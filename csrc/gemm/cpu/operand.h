// Reads an operand out of its segments: in place where the micro-kernel can, packed into
// panels of words elsewhere. Packing is where a gather or a widening happens.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "gemm/cpu/kernels.h"
#include "gemm/views.h"

namespace jax_ub {

// Half-open.
struct Range {
  int64_t begin = 0;
  int64_t end = 0;
  int64_t size() const { return end - begin; }
};

constexpr int64_t CeilDiv(int64_t a, int64_t b) { return (a + b - 1) / b; }
constexpr int64_t RoundUp(int64_t a, int64_t b) { return CeilDiv(a, b) * b; }

// The words of one tile of A, as a TileFunction wants them.
struct ATile {
  const void* words;
  int64_t stride;  // in bytes
};

// What one segment holds, contiguous along the outer dimension; null: it does not.
struct InPlaceRows {
  const std::byte* data = nullptr;
  int64_t stride = 0;  // in bytes, of the words' rows along K
};

class OperandReader {
 public:
  // `panel` is the width of a panel: tile_rows for A, tile_columns for B. Both `view` and
  // `kernels` outlive the operand.
  OperandReader(const OperandView& view,
                const KernelSet& kernels,
                const PanelPackers& packers,
                int panel);

  bool is_k_contiguous() const { return is_k_contiguous_; }

  // True where tiles of A are read as rows, in place where that is possible: every segment
  // is contiguous along K and the kernels like it.
  bool reads_rows() const { return kernels_.reads_a_in_place && is_k_contiguous_; }

  // Whether tiles of A are made of rows, read or packed.
  bool has_rows() const { return reads_rows() || panel_ == 1; }

  // The tile that PackPanels wrote to `panels`, over `k` elements of K.
  ATile PackedTile(const std::byte* panels, int64_t k) const {
    return {panels, panel_ == 1 ? PanelBytes(k) : int64_t{4} * panel_};
  }

  // From one packed panel over `k` elements of K to the next, in bytes.
  int64_t PanelBytes(int64_t k) const;

  // Packs `outer` over `k` into panels, one after the other: word (o, k) goes to
  // panels + o / panel width * PanelBytes + 4 * (k * panel width + o % panel width). What
  // remains of the last panel's width is not written.
  void PackPanels(Range outer, Range k, std::byte* panels) const;

  // `outer` over `k` as a packing tile reads it, where it lies so.
  InPlaceRows FindInPlaceRows(Range outer, Range k) const;

  // The memory that `outer` over `k` is read from, as far as one segment holds it, to be
  // asked for in `num_steps`.
  PrefetchCursor LinesOf(Range outer, Range k, int64_t num_steps) const;

  // A tile of rows (reads_rows): in place if its words lie in one segment and need no
  // widening, else copied to `rows` (PanelBytes), one behind the other.
  ATile ReadRows(Range outer, Range k, std::byte* rows) const;

 private:
  int64_t NumWords(int64_t k) const {
    return (k + kernels_.k_per_word - 1) / kernels_.k_per_word;
  }
  const ConstSegment& SegmentAt(int64_t outer_index, int64_t k_index) const;
  // The part of PackPanels, which began at `first_outer`, that segments of one outer index
  // hold.
  void PackOuterSegment(int64_t outer_segment,
                        Range outer,
                        int64_t first_outer,
                        Range k,
                        std::byte* panels) const;
  // The part that one segment holds, from `source` on. Both ranges count
  // from where the panels begin.
  void PackSegment(const ConstSegment& segment,
                   const std::byte* source,
                   Range outer,
                   Range k,
                   std::byte* panels,
                   int64_t panel_bytes) const;

  const OperandView& view_;
  const KernelSet& kernels_;
  const PanelPackers& packers_;
  const int panel_;
  const int64_t element_bytes_;
  const bool is_k_contiguous_;  // every segment
};

// Which of the segments that `bounds` delimit holds `index`.
inline int64_t FindSegment(const std::vector<int64_t>& bounds, int64_t index) {
  if (bounds.size() == 2) return 0;  // by far the most: asked for every tile
  return std::upper_bound(bounds.begin(), bounds.end(), index) - bounds.begin() - 1;
}

}  // namespace jax_ub
