#include "gemm/cpu/operand.h"

#include <algorithm>
#include <cstring>
#include <numeric>

namespace jax_ub {

namespace {

// Packs one k of `outer` words that are pairs of bf16: the high or the low half of each
// word. For a range of K that begins or ends inside a pair. Writing the low half clears
// the high half, which is correct if K ends there.
void PackHalf(WidenFunction widen,
              const std::byte* source,
              int64_t stride,
              int64_t outer,
              bool is_high,
              std::byte* row,
              int64_t panel,
              int64_t panel_bytes) {
  for (int64_t o = 0; o < outer; ++o, source += stride) {
    std::byte* word = row + o / panel * panel_bytes + 4 * (o % panel);
    if (!is_high) std::memset(word, 0, 4);
    widen(source, 1, word + (is_high ? 2 : 0));
  }
}

// Size of a way of the L1 cache. Rows whose distance is a multiple of it map to the
// same cache set, which holds only a few of them. AMX loads 16 rows at once. They are
// copied first if they are 2048 or 4096 bytes apart (measured with gemm_bench, 1024 x
// 1024 x 1536 and 2048 x 2048 x 2048: 10 to 25 % faster than in place), else read in
// place (256 x 1408 x 1024: 15 % faster).
constexpr int64_t kWayBytes = 4096;
constexpr int64_t kRowsInOnePlace = 4;

// Returns whether `at_once` rows that are `stride` bytes apart fit the L1 cache
// together.
bool FitFirstCache(int64_t at_once, int64_t stride) {
  return at_once <= kRowsInOnePlace * (kWayBytes / std::gcd(stride, kWayBytes));
}

}  // namespace

OperandReader::OperandReader(const OperandView& view,
                             const KernelSet& kernels,
                             const PanelPackers& packers,
                             int panel)
    : view_(view),
      kernels_(kernels),
      packers_(packers),
      panel_(panel),
      widen_(kernels.widen[static_cast<int>(view.dtype)]),
      element_bytes_(SizeOf(view.dtype)),
      is_k_contiguous_(std::all_of(
          view.segments.begin(), view.segments.end(), [](const ConstSegment& s) {
            return s.inner_stride == 1;
          })) {}

// Returns an odd number of cache lines. Panels that are a multiple of 4096 bytes apart
// would map to the same L1 cache set, and packing writes a row of all panels at a time.
int64_t OperandReader::PanelBytes(int64_t k) const {
  return kLineBytes * (CeilDiv(4 * NumWords(k) * panel_, kLineBytes) | 1);
}

const ConstSegment& OperandReader::SegmentAt(int64_t outer_index,
                                             int64_t k_index) const {
  const int64_t num_inner = static_cast<int64_t>(view_.inner_bounds.size()) - 1;
  return view_.segments[outer_index * num_inner + k_index];
}

void OperandReader::PackPanels(Range outer, Range k, std::byte* panels) const {
  const auto& bounds = view_.outer_bounds;
  int64_t i = FindSegment(bounds, outer.begin);
  for (int64_t o = outer.begin; o < outer.end;) {
    while (bounds[i + 1] <= o) ++i;
    Range part = {o, std::min(outer.end, bounds[i + 1])};
    // The part ends where a panel that the previous segment has only partly filled is
    // complete.
    const int64_t begun = (o - outer.begin) % panel_;
    if (begun != 0) part.end = std::min(part.end, o + panel_ - begun);
    PackOuterSegment(i, part, outer.begin, k, panels);
    o = part.end;
  }
}

void OperandReader::PackOuterSegment(int64_t outer_segment,
                                     Range outer,
                                     int64_t first_outer,
                                     Range k,
                                     std::byte* panels) const {
  const auto& bounds = view_.inner_bounds;
  for (int64_t at = k.begin, j = FindSegment(bounds, at); at < k.end; ++j) {
    const int64_t end = std::min(k.end, bounds[j + 1]);
    if (end <= at) continue;
    const ConstSegment& segment = SegmentAt(outer_segment, j);
    const int64_t offset =
        (outer.begin - view_.outer_bounds[outer_segment]) * segment.outer_stride +
        (at - bounds[j]) * segment.inner_stride;
    PackSegment(segment, segment.data + offset * element_bytes_,
                {outer.begin - first_outer, outer.end - first_outer},
                {at - k.begin, end - k.begin}, panels, PanelBytes(k.size()));
    at = end;
  }
}

void OperandReader::PackSegment(const ConstSegment& segment,
                                const std::byte* source,
                                Range outer,
                                Range k,
                                std::byte* panels,
                                int64_t panel_bytes) const {
  const int64_t k_stride = segment.inner_stride * element_bytes_;
  const int64_t outer_stride = segment.outer_stride * element_bytes_;
  const bool is_k_contiguous = segment.inner_stride == 1;
  const PackFunction pack = is_k_contiguous
                                ? packers_.transposed[static_cast<int>(view_.dtype)]
                                : packers_.copied[static_cast<int>(view_.dtype)];
  std::byte* first =
      panels + outer.begin / panel_ * panel_bytes + 4 * (outer.begin % panel_);
  auto row_at = [&](int64_t k_index) {
    return first + 4 * (k_index / kernels_.k_per_word * panel_);
  };
  if (k.begin % kernels_.k_per_word != 0) {
    PackHalf(widen_, source, outer_stride, outer.size(), true, row_at(k.begin), panel_,
             panel_bytes);
    ++k.begin;
    source += k_stride;
  }
  const int64_t num_words = k.size() / kernels_.k_per_word;
  pack(source, is_k_contiguous ? outer_stride : k_stride, outer.size(), num_words,
       row_at(k.begin), panel_bytes);
  const int64_t packed = num_words * kernels_.k_per_word;
  if (packed < k.size()) {
    PackHalf(widen_, source + packed * k_stride, outer_stride, outer.size(), false,
             row_at(k.begin + packed), panel_, panel_bytes);
  }
}

InPlaceRows OperandReader::FindInPlaceRows(Range outer, Range k) const {
  if (k.size() == 0) return {};
  const int64_t i = FindSegment(view_.outer_bounds, outer.begin);
  const int64_t j = FindSegment(view_.inner_bounds, k.begin);
  const ConstSegment& segment = SegmentAt(i, j);
  if (outer.end > view_.outer_bounds[i + 1] || k.end > view_.inner_bounds[j + 1] ||
      segment.outer_stride != 1 || segment.inner_stride == 1 ||
      k.size() % kernels_.k_per_word != 0) {
    return {};
  }
  const int64_t offset = (outer.begin - view_.outer_bounds[i]) +
                         (k.begin - view_.inner_bounds[j]) * segment.inner_stride;
  return {segment.data + offset * element_bytes_,
          segment.inner_stride * element_bytes_};
}

PrefetchCursor OperandReader::LinesOf(Range outer, Range k, int64_t num_steps) const {
  const int64_t i = FindSegment(view_.outer_bounds, outer.begin);
  const int64_t j = FindSegment(view_.inner_bounds, k.begin);
  const ConstSegment& segment = SegmentAt(i, j);
  const int64_t num_outer =
      std::min(outer.end, view_.outer_bounds[i + 1]) - outer.begin;
  const int64_t num_k = std::min(k.end, view_.inner_bounds[j + 1]) - k.begin;
  const int64_t offset = (outer.begin - view_.outer_bounds[i]) * segment.outer_stride +
                         (k.begin - view_.inner_bounds[j]) * segment.inner_stride;
  const bool is_k_contiguous = segment.inner_stride == 1;
  PrefetchCursor lines = {
      .row = reinterpret_cast<const char*>(segment.data) + offset * element_bytes_,
      .row_bytes = (is_k_contiguous ? num_k : num_outer) * element_bytes_,
      .stride = (is_k_contiguous ? segment.outer_stride : segment.inner_stride) *
                element_bytes_,
      .num_rows = is_k_contiguous ? num_outer : num_k,
  };
  // A row of this block continues the row of the previous panel. The cache line that
  // both share is already in the cache, so skip it.
  if (!is_k_contiguous) lines.row += kLineBytes - 1;
  const int64_t num_lines = lines.num_rows * CeilDiv(lines.row_bytes, kLineBytes);
  lines.lines_per_step = CeilDiv(num_lines, std::max<int64_t>(1, num_steps));
  return lines;
}

ATile OperandReader::ReadRows(Range outer, Range k, std::byte* rows) const {
  const auto& outer_bounds = view_.outer_bounds;
  const auto& k_bounds = view_.inner_bounds;
  if (k.size() == 0) return {rows, 0};
  const int64_t i = FindSegment(outer_bounds, outer.begin);
  const int64_t j = FindSegment(k_bounds, k.begin);
  const bool is_word = element_bytes_ * kernels_.k_per_word == 4;
  if (is_word && outer.end <= outer_bounds[i + 1] && k.end <= k_bounds[j + 1] &&
      k.size() % kernels_.k_per_word == 0) {
    const ConstSegment& segment = SegmentAt(i, j);
    const int64_t offset = (outer.begin - outer_bounds[i]) * segment.outer_stride +
                           (k.begin - k_bounds[j]);
    const int64_t stride = segment.outer_stride * element_bytes_;
    const bool is_whole = outer.size() % kernels_.whole_rows == 0;
    if (is_whole && FitFirstCache(kernels_.whole_rows, stride)) {
      return {segment.data + offset * element_bytes_, stride};
    }
  }
  const int64_t row_bytes = 4 * NumWords(k.size());
  std::byte* row = rows;
  for (int64_t o = outer.begin, oi = i; o < outer.end; ++o, row += row_bytes) {
    while (o >= outer_bounds[oi + 1]) ++oi;
    int64_t done_bytes = 0;
    for (int64_t at = k.begin, kj = j; at < k.end; ++kj) {
      const int64_t k_end = std::min(k.end, k_bounds[kj + 1]);
      const ConstSegment& segment = SegmentAt(oi, kj);
      const int64_t offset =
          (o - outer_bounds[oi]) * segment.outer_stride + (at - k_bounds[kj]);
      const std::byte* source = segment.data + offset * element_bytes_;
      const int64_t count = k_end - at;
      widen_(source, count, row + done_bytes);
      done_bytes += count * (4 / kernels_.k_per_word);
      at = k_end;
    }
    std::memset(row + done_bytes, 0, row_bytes - done_bytes);
  }
  return {rows, row_bytes};
}

}  // namespace jax_ub
