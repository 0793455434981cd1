#include "gemm/cpu/operand.h"

#include <algorithm>
#include <bit>
#include <cstring>
#include <numeric>

namespace jax_ub {

namespace {

// Packs the elements with a single index k into one half of each of `outer` words,
// which are pairs of bf16. Used where a range of K begins or ends inside a pair.
// Writing the low half also clears the high half, which must be zero if K ends inside
// the pair.
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

// In panels with fewer than kNarrowPanel columns, a row does not fill a vector. Several
// rows of such a panel are therefore multiplied by their FP8 scales in one call, up to
// kMaxScaledWords words.
constexpr int64_t kNarrowPanel = 8;
constexpr int64_t kMaxScaledWords = 512;

constexpr int64_t kNoScale = -1;

// Consecutive words along K whose elements have the same FP8 scales.
struct WordRun {
  int64_t word;  // index of the first word
  int64_t num_words;
  int64_t k[2];   // k of the scales of the lower and the upper half; kNoScale: none
  int64_t k_end;  // end of the run, in elements
};

// Returns the next run of words, from element `k` on, that have equal scales. A word is
// one f32 or a pair of bf16 (`k_per_word`). The segment begins at `k_begin` and has one
// scale per `block` elements.
//
// A pair with elements of two blocks is a run by itself, with two scales. If [k, k_end)
// begins or ends in the middle of a pair, the half outside the range gets kNoScale.
WordRun WordsWithEqualScales(
    int64_t k, int64_t k_end, int64_t k_begin, int64_t block, int64_t k_per_word) {
  const int64_t block_end = k_begin + ((k - k_begin) / block + 1) * block;
  const int64_t end = std::min(k_end, block_end);
  const int64_t word = k / k_per_word;
  if (k_per_word == 1) return {word, end - k, {k, kNoScale}, end};
  if (k % 2 != 0) return {word, 1, {kNoScale, k}, k + 1};
  if (end - k >= 2) return {word, (end - k) / 2, {k, k}, k + (end - k) / 2 * 2};
  if (k + 1 < k_end) return {word, 1, {k, k + 1}, k + 2};
  return {word, 1, {k, kNoScale}, k + 1};
}

// Writes the `size` numbers at `from` to `to`, `times` times, one copy after the other.
void Repeat(const float* from, int64_t size, int64_t times, float* to) {
  if (size == 1) {
    std::fill_n(to, times, *from);
    return;
  }
  for (int64_t i = 0; i < times; ++i) to = std::copy_n(from, size, to);
}

// kWayBytes is the size of a way of the L1 cache. Addresses whose distance is a
// multiple of kWayBytes map to the same cache set, in which kRowsInOnePlace rows are
// assumed to fit. AMX loads 16 rows at once, so rows whose distance is a multiple of
// 2048 bytes are copied first (gemm_bench, 1024 x 1024 x 1536 and 2048 x 2048 x 2048:
// 10 to 25 % faster than in place). Rows at other distances are read in place (256 x
// 1408 x 1024: 15 % faster than with copies).
constexpr int64_t kWayBytes = 4096;
constexpr int64_t kRowsInOnePlace = 4;

// Returns whether the L1 cache can hold one cache line of each of `at_once` rows that
// are `stride` bytes apart.
bool FitFirstCache(int64_t at_once, int64_t stride) {
  return at_once <= kRowsInOnePlace * (kWayBytes / std::gcd(stride, kWayBytes));
}

}  // namespace

// Reads the FP8 scales of one segment of an operand. All indices are relative to the
// segment.
class OperandReader::ScaleReader {
 public:
  ScaleReader(const ScaleSegment& scales, DType dtype)
      : scales_(scales), dtype_(dtype) {}

  int64_t inner_block() const { return scales_.inner_block; }

  // Writes the scales of elements (outer, k) as f32. Returns whether any scale is
  // 2^-127, the smallest e8m0 number, which is subnormal in f32 and would count as
  // zero. Such a scale takes two multiplications: a call without `halves` writes 2^-126
  // for it, and a second call, with `halves`, writes 1/2 for it and 1 for all other
  // scales.
  bool Copy(Range outer, int64_t k, bool halves, float* to) const {
    const int64_t stride = scales_.outer_stride * SizeOf(dtype_);
    const std::byte* first =
        scales_.data + k / scales_.inner_block * scales_.inner_stride * SizeOf(dtype_);
    if (scales_.outer_block == 1 && dtype_ == DType::kE8M0 && !halves) {
      // The case of stride 1 passes a constant, so that the compiler vectorizes the
      // loop in CopyE8M0.
      const std::byte* from = first + outer.begin * stride;
      return stride == 1 ? CopyE8M0(from, 1, outer.size(), to)
                         : CopyE8M0(from, stride, outer.size(), to);
    }
    bool has_smallest = false;
    for (int64_t o = outer.begin; o < outer.end;) {
      const int64_t block = o / scales_.outer_block;
      const int64_t end = std::min(outer.end, (block + 1) * scales_.outer_block);
      const std::byte* from = first + block * stride;
      const bool is_smallest = dtype_ == DType::kE8M0 && *from == std::byte{0};
      has_smallest |= is_smallest;
      const float scale = halves ? (is_smallest ? 0.5f : 1.0f) : F32At(from);
      to = std::fill_n(to, end - o, scale);
      o = end;
    }
    return has_smallest;
  }

 private:
  static bool CopyE8M0(const std::byte* from, int64_t stride, int64_t size, float* to) {
    uint32_t has_smallest = 0;
    for (int64_t i = 0; i < size; ++i) {
      const auto bits = static_cast<uint32_t>(from[i * stride]);
      has_smallest |= bits == 0;
      to[i] = F32OfE8M0(bits);
    }
    return has_smallest != 0;
  }

  static float F32OfE8M0(uint32_t bits) {
    constexpr uint32_t kNan = 0x7fc00000;
    return std::bit_cast<float>(bits == 0xff ? kNan : std::max(bits, 1u) << 23);
  }

  float F32At(const std::byte* from) const {
    if (dtype_ == DType::kE8M0) return F32OfE8M0(static_cast<uint32_t>(*from));
    float scale;
    std::memcpy(&scale, from, sizeof scale);
    return scale;
  }

  const ScaleSegment& scales_;
  const DType dtype_;
};

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
      is_k_contiguous_(IsContiguousAlongK(view)) {}

// The distance between panels is an odd number of cache lines, because packing writes
// the same row of all panels one after the other. At a distance of 4096 bytes, these
// rows would be in the same set of the L1 cache.
int64_t OperandReader::PanelBytes(int64_t k) const {
  return kLineBytes * (CeilDiv(4 * NumWords(k) * panel_, kLineBytes) | 1);
}

const ConstSegment& OperandReader::SegmentAt(int64_t i, int64_t j) const {
  return view_.segments[i * (std::ssize(view_.inner_bounds) - 1) + j];
}

const std::byte* OperandReader::AddressAt(int64_t i,
                                          int64_t j,
                                          int64_t outer,
                                          int64_t k) const {
  const ConstSegment& segment = SegmentAt(i, j);
  const int64_t offset = (outer - view_.outer_bounds[i]) * segment.outer_stride +
                         (k - view_.inner_bounds[j]) * segment.inner_stride;
  return segment.data + offset * element_bytes_;
}

void OperandReader::PackPanels(Range outer, Range k, std::byte* panels) const {
  const auto& bounds = view_.outer_bounds;
  int64_t i = FindSegment(bounds, outer.begin);
  for (int64_t o = outer.begin; o < outer.end;) {
    while (bounds[i + 1] <= o) ++i;
    Range part = {o, std::min(outer.end, bounds[i + 1])};
    // If the previous segment ended inside a panel, the rest of this panel is filled
    // first.
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
    const Range outer_part = {outer.begin - first_outer, outer.end - first_outer};
    const Range k_part = {at - k.begin, end - k.begin};
    const int64_t panel_bytes = PanelBytes(k.size());
    PackSegment(SegmentAt(outer_segment, j),
                AddressAt(outer_segment, j, outer.begin, at), outer_part, k_part,
                panels, panel_bytes);
    if (!view_.scales.empty()) {
      ScaleSegmentPart(outer_segment * (std::ssize(bounds) - 1) + j,
                       view_.outer_bounds[outer_segment] - first_outer,
                       bounds[j] - k.begin, outer_part, k_part, panels, panel_,
                       panel_bytes);
    }
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

void OperandReader::ScaleSegmentPart(int64_t segment,
                                     int64_t outer_begin,
                                     int64_t k_begin,
                                     Range outer,
                                     Range k,
                                     std::byte* panels,
                                     int64_t panel_width,
                                     int64_t panel_bytes) const {
  const ScaleReader scales(view_.scales[segment], view_.scale_dtype);
  for (int64_t o = outer.begin; o < outer.end;) {
    const int64_t panel = o / panel_width;
    const int64_t end = std::min(outer.end, (panel + 1) * panel_width);
    std::byte* words = panels + panel * panel_bytes + 4 * (o % panel_width);
    const Range columns = {o - outer_begin, end - outer_begin};
    if (ScaleColumns(scales, columns, k, k_begin, words, panel_width, false)) {
      ScaleColumns(scales, columns, k, k_begin, words, panel_width, true);
    }
    o = end;
  }
}

bool OperandReader::ScaleColumns(const ScaleReader& scales,
                                 Range outer,
                                 Range k,
                                 int64_t k_begin,
                                 std::byte* words,
                                 int64_t panel_width,
                                 bool halves) const {
  const int64_t k_per_word = kernels_.k_per_word;
  const int64_t size = outer.size();
  // The rows of a narrow panel are contiguous, so several of them are scaled at once.
  const bool is_narrow = size == panel_width && panel_width < kNarrowPanel;
  const int64_t most_rows = kMaxScaledWords / panel_width;
  float row[2][kMaxTileColumns];          // factors of the lower and the upper k
  float narrow_rows[2][kMaxScaledWords];  // of several rows of a narrow panel
  int64_t first = k.begin / k_per_word;   // the first of these rows
  int64_t num_rows = 0;
  const auto multiply_narrow_rows = [&] {
    kernels_.scale(words + 4 * first * panel_width, 0, 1, num_rows * size,
                   narrow_rows[0], narrow_rows[1]);
    first += num_rows;
    num_rows = 0;
  };
  bool has_smallest = false;
  for (int64_t at = k.begin; at < k.end;) {
    const WordRun run =
        WordsWithEqualScales(at, k.end, k_begin, scales.inner_block(), k_per_word);
    at = run.k_end;
    for (int half = 0; half < k_per_word; ++half) {
      const int64_t of_k = run.k[half];
      if (of_k == kNoScale) {
        std::fill_n(row[half], size, 1.0f);
      } else if (half == 1 && of_k == run.k[0]) {
        std::copy_n(row[0], size, row[1]);
      } else {
        has_smallest |= scales.Copy(outer, of_k - k_begin, halves, row[half]);
      }
    }
    if (!is_narrow) {
      kernels_.scale(words + 4 * run.word * panel_width, 4 * panel_width, run.num_words,
                     size, row[0], row[1]);
      continue;
    }
    for (int64_t i = 0; i < run.num_words;) {
      const int64_t rows = std::min(run.num_words - i, most_rows - num_rows);
      for (int half = 0; half < k_per_word; ++half) {
        Repeat(row[half], size, rows, narrow_rows[half] + num_rows * size);
      }
      i += rows;
      num_rows += rows;
      if (num_rows == most_rows) multiply_narrow_rows();
    }
  }
  if (num_rows > 0) multiply_narrow_rows();
  return has_smallest;
}

void OperandReader::FindSource(Range outer, Range k, BPanel& panel) const {
  if (k.size() == 0) return;
  const int64_t i = FindSegment(view_.outer_bounds, outer.begin);
  const int64_t j = FindSegment(view_.inner_bounds, k.begin);
  const ConstSegment& segment = SegmentAt(i, j);
  if (outer.end > view_.outer_bounds[i + 1] || k.end > view_.inner_bounds[j + 1] ||
      segment.outer_stride != 1 || segment.inner_stride == 1 ||
      k.size() % kernels_.k_per_word != 0) {
    return;
  }
  panel.source = AddressAt(i, j, outer.begin, k.begin);
  panel.source_stride = segment.inner_stride * element_bytes_;
}

PrefetchCursor OperandReader::LinesOf(Range outer, Range k, int64_t num_steps) const {
  const int64_t i = FindSegment(view_.outer_bounds, outer.begin);
  const int64_t j = FindSegment(view_.inner_bounds, k.begin);
  const ConstSegment& segment = SegmentAt(i, j);
  const int64_t num_outer =
      std::min(outer.end, view_.outer_bounds[i + 1]) - outer.begin;
  const int64_t num_k = std::min(k.end, view_.inner_bounds[j + 1]) - k.begin;
  const bool is_k_contiguous = segment.inner_stride == 1;
  PrefetchCursor lines = {
      .row = reinterpret_cast<const char*>(AddressAt(i, j, outer.begin, k.begin)),
      .row_bytes = (is_k_contiguous ? num_k : num_outer) * element_bytes_,
      .stride = (is_k_contiguous ? segment.outer_stride : segment.inner_stride) *
                element_bytes_,
      .num_rows = is_k_contiguous ? num_outer : num_k,
  };
  // The first cache line of a row may also contain the end of a row of the previous
  // panel. Such a line is skipped, because it is already in the cache.
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
    const int64_t stride = SegmentAt(i, j).outer_stride * element_bytes_;
    const bool is_whole = outer.size() % kernels_.whole_rows == 0;
    if (is_whole && FitFirstCache(kernels_.whole_rows, stride)) {
      return {AddressAt(i, j, outer.begin, k.begin), stride};
    }
  }
  const int64_t row_bytes = 4 * NumWords(k.size());
  std::byte* row = rows;
  for (int64_t o = outer.begin, oi = i; o < outer.end; ++o, row += row_bytes) {
    while (o >= outer_bounds[oi + 1]) ++oi;
    int64_t done_bytes = 0;
    for (int64_t at = k.begin, kj = j; at < k.end; ++kj) {
      const int64_t k_end = std::min(k.end, k_bounds[kj + 1]);
      const int64_t count = k_end - at;
      widen_(AddressAt(oi, kj, o, at), count, row + done_bytes);
      if (!view_.scales.empty()) {
        ScaleSegmentPart(oi * (std::ssize(k_bounds) - 1) + kj, outer_bounds[oi] - o,
                         k_bounds[kj] - k.begin, {0, 1},
                         {at - k.begin, k_end - k.begin}, row, 1, row_bytes);
      }
      done_bytes += count * (4 / kernels_.k_per_word);
      at = k_end;
    }
    std::memset(row + done_bytes, 0, row_bytes - done_bytes);
  }
  return {rows, row_bytes};
}

}  // namespace jax_ub
