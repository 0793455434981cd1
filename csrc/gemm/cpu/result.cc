#include "gemm/cpu/result.h"

#if defined(__x86_64__)
#include <emmintrin.h>
#endif

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>

namespace jax_ub {

namespace {

// Prefetches the cache lines of a rectangle, for writing if kWrites is 1, for reading
// if 0 (as in __builtin_prefetch).
template <int kWrites>
void PrefetchLines(const std::byte* data,
                   int64_t element_bytes,
                   int64_t row_stride,
                   Range rows,
                   Range columns) {
  for (int64_t r = rows.begin; r < rows.end; ++r) {
    const std::byte* row = data + r * row_stride * element_bytes;
    const std::byte* end = row + columns.end * element_bytes;
    for (const std::byte* line = row + columns.begin * element_bytes; line < end;
         line += kLineBytes) {
      __builtin_prefetch(line, kWrites);
    }
  }
}

// Returns whether all products of `scale` and the factors are normal f32 numbers.
bool AreProductsNormal(float scale, const float* factors, int64_t columns) {
  constexpr uint32_t kExponentMask = 0x7f800000;
  uint32_t has_other = 0;
  for (int64_t c = 0; c < columns; ++c) {
    const uint32_t bits = std::bit_cast<uint32_t>(scale * factors[c]);
    const uint32_t exponent = bits & kExponentMask;
    has_other |= exponent == 0 || exponent == kExponentMask;
  }
  return has_other == 0;
}

// Multiplies each sum of a row by `scale` and by the factor of its column: by their
// product or, if f32 cannot represent the product as a normal number, by `scale` and
// then by the factor.
void ScaleRow(float* sums, int64_t columns, float scale, const float* factors) {
  if (AreProductsNormal(scale, factors, columns)) {
    for (int64_t c = 0; c < columns; ++c) sums[c] *= scale * factors[c];
    return;
  }
  for (int64_t c = 0; c < columns; ++c) {
    const float product = scale * factors[c];
    sums[c] = std::isnormal(product) ? sums[c] * product : sums[c] * scale * factors[c];
  }
}

void ScaleRow(float* sums, int64_t columns, float scale) {
  if (scale == 1) return;  // such as the scale of an operand that is not FP8
  for (int64_t c = 0; c < columns; ++c) sums[c] *= scale;
}

// Replicas of the result are written with non-temporal stores if all of them together
// have more than this number of bytes. Such replicas would not fit into the caches, and
// non-temporal stores do not read the cache lines that they overwrite (Zen 4, 8
// replicas of 1024 x 1024: GEMM+AR is 8 % faster; GEMM+AR and the operations that read
// the result are together 0 to 6 % faster).
constexpr int64_t kStreamedBytes = 4 << 20;

void CopyBytes(std::byte* to, const std::byte* from, int64_t size) {
  std::memcpy(to, from, size);
}

// Copies `size` bytes with non-temporal stores. FinishStream must be called before
// another thread reads the copy.
void StreamBytes(std::byte* to, const std::byte* from, int64_t size) {
#if defined(__x86_64__)
  constexpr int64_t kVector = sizeof(__m128i);
  const int64_t head =
      std::min(size, static_cast<int64_t>(-reinterpret_cast<uintptr_t>(to) % kVector));
  std::memcpy(to, from, head);
  int64_t at = head;
  for (; at + kVector <= size; at += kVector) {
    _mm_stream_si128(reinterpret_cast<__m128i*>(to + at),
                     _mm_loadu_si128(reinterpret_cast<const __m128i*>(from + at)));
  }
  std::memcpy(to + at, from + at, size - at);
#else
  CopyBytes(to, from, size);
#endif
}

void FinishStream() {
#if defined(__x86_64__)
  _mm_sfence();
#endif
}

}  // namespace

ResultWriter::ResultWriter(const GemmProblem& problem, const KernelSet& kernels)
    : scale_(problem.scale),
      view_(problem.c),
      addends_(problem.addends),
      factors_(problem.factors),
      kernels_(kernels),
      num_row_segments_(static_cast<int64_t>(view_.row_bounds.size()) - 1),
      num_column_segments_(static_cast<int64_t>(view_.column_bounds.size()) - 1),
      are_copies_(view_.num_replicas > 1 && addends_.empty()),
      is_streamed_(are_copies_ &&
                   problem.m * problem.n * view_.num_replicas * SizeOf(view_.dtype) >
                       kStreamedBytes),
      has_factors_by_k_(problem.has_factors_by_k),
      is_scaled_(!has_factors_by_k_ && (scale_ != 1 || !factors_.empty())),
      is_plain_(addends_.size() <= (is_scaled_ ? 0 : 1) && !stores_rows() &&
                !has_factors_by_k_) {}

bool ResultWriter::FindOutput(Range rows, Range columns, TileOutput& output) const {
  if (!is_plain_) return false;
  const int64_t i = FindSegment(view_.row_bounds, rows.begin);
  const int64_t j = FindSegment(view_.column_bounds, columns.begin);
  if (rows.end > view_.row_bounds[i + 1] || columns.end > view_.column_bounds[j + 1]) {
    return false;
  }
  const int64_t row = rows.begin - view_.row_bounds[i];
  const int64_t column = columns.begin - view_.column_bounds[j];
  const int64_t index = i * num_column_segments_ + j;
  const std::optional<float> factor = FindFactor(index);
  if (!factor) return false;
  output.factor = *factor;
  const Segment& to = view_.segments[index];
  const int64_t bytes = SizeOf(view_.dtype);
  output.to = to.data + (row * to.row_stride + column) * bytes;
  output.to_stride = to.row_stride * bytes;
  output.to_dtype = view_.dtype;
  for (const AddendView& addend : addends_) {
    const AddendSegment& from = addend.segments[index];
    const int64_t addend_bytes = SizeOf(addend.dtype);
    output.after = from.data + (row * from.row_stride + column) * addend_bytes;
    output.after_stride = from.row_stride * addend_bytes;
    output.after_dtype = addend.dtype;
  }
  return true;
}

template <typename Visit>
void ResultWriter::ForEachSegmentBlock(Range rows,
                                       Range columns,
                                       const Visit& visit) const {
  const auto& row_bounds = view_.row_bounds;
  const auto& column_bounds = view_.column_bounds;
  const int64_t first_column = FindSegment(column_bounds, columns.begin);
  for (int64_t r = rows.begin, i = FindSegment(row_bounds, r); r < rows.end; ++i) {
    const int64_t r_end = std::min(rows.end, row_bounds[i + 1]);
    for (int64_t c = columns.begin, j = first_column; c < columns.end; ++j) {
      const int64_t c_end = std::min(columns.end, column_bounds[j + 1]);
      if (r_end > r && c_end > c) {
        visit(SegmentBlock{i * num_column_segments_ + j,
                           {r - row_bounds[i], r_end - row_bounds[i]},
                           {c - column_bounds[j], c_end - column_bounds[j]}},
              r - rows.begin, c - columns.begin);
      }
      c = c_end;
    }
    r = r_end;
  }
}

void ResultWriter::Store(float* sums,
                         int64_t sums_stride,
                         Range rows,
                         Range columns) const {
  ForEachSegmentBlock(rows, columns,
                      [&](const SegmentBlock& block, int64_t row, int64_t column) {
                        float* const from = sums + row * sums_stride + column;
                        if (is_scaled_) {
                          ScaleSegmentBlock(0, from, sums_stride, block);
                        }
                        StoreSegmentBlock(from, sums_stride, block);
                      });
}

void ResultWriter::Scale(int64_t k_segment,
                         float* sums,
                         int64_t sums_stride,
                         Range rows,
                         Range columns) const {
  const int64_t first = k_segment * num_row_segments_ * num_column_segments_;
  ForEachSegmentBlock(
      rows, columns, [&](const SegmentBlock& block, int64_t row, int64_t column) {
        ScaleSegmentBlock(first, sums + row * sums_stride + column, sums_stride, block);
      });
}

void ResultWriter::CopyReplicas(Range rows, Range columns) const {
  if (!are_copies_) return;
  const auto copy = is_streamed_ ? StreamBytes : CopyBytes;
  ForEachSegmentBlock(rows, columns, [&](const SegmentBlock& block, int64_t, int64_t) {
    const int64_t row_bytes = block.columns.size() * SizeOf(view_.dtype);
    const BytesAt from = Find(0, block);
    for (int replica = 1; replica < view_.num_replicas; ++replica) {
      const BytesAt to = Find(replica, block);
      for (int64_t r = 0; r < block.rows.size(); ++r) {
        copy(to.data + r * to.row_stride, from.data + r * from.row_stride, row_bytes);
      }
    }
  });
  if (is_streamed_) FinishStream();
}

void ResultWriter::Prefetch(Range rows, Range columns) const {
  if (stores_rows()) return;  // stores happen later, and in long rows
  const int64_t i = FindSegment(view_.row_bounds, rows.begin);
  const int64_t j = FindSegment(view_.column_bounds, columns.begin);
  const Range own_rows = {
      rows.begin - view_.row_bounds[i],
      std::min(rows.end, view_.row_bounds[i + 1]) - view_.row_bounds[i]};
  const Range own_columns = {
      columns.begin - view_.column_bounds[j],
      std::min(columns.end, view_.column_bounds[j + 1]) - view_.column_bounds[j]};
  const int64_t index = i * num_column_segments_ + j;
  const Segment& to = view_.segments[index];
  PrefetchLines<1>(to.data, SizeOf(view_.dtype), to.row_stride, own_rows, own_columns);
  for (const AddendView& addend : addends_) {
    const AddendSegment& from = addend.segments[index];
    // No prefetch is needed for an addend in the memory of the result, which has just
    // been prefetched, or for a bias, which is in the cache.
    if (from.data == to.data || from.row_stride == 0) continue;
    PrefetchLines<0>(from.data, SizeOf(addend.dtype), from.row_stride, own_rows,
                     own_columns);
  }
}

std::optional<float> ResultWriter::FindFactor(int64_t segment) const {
  float product = scale_;
  for (const FactorView& factor : factors_) {
    if (!factor.segments[segment].is_one()) return std::nullopt;
    product *= *factor.segments[segment].data;
  }
  if (!std::isnormal(product)) return std::nullopt;
  return product;
}

// Applies all factors to a row before the next row. Several passes over a row are
// cheap, because the sums are only a tile or a few rows, which are in the cache.
void ResultWriter::ScaleSegmentBlock(int64_t first,
                                     float* sums,
                                     int64_t sums_stride,
                                     const SegmentBlock& block) const {
  const int64_t columns = block.columns.size();
  if (const auto product = FindFactor(first + block.segment)) {
    for (int64_t r = 0; r < block.rows.size(); ++r) {
      ScaleRow(sums + r * sums_stride, columns, *product);
    }
    return;
  }
  for (int64_t r = 0; r < block.rows.size(); ++r) {
    float* const row = sums + r * sums_stride;
    float scale = scale_;  // the product of the factors that are not applied yet
    for (const FactorView& factor : factors_) {
      const FactorSegment& segment = factor.segments[first + block.segment];
      const float* from = segment.data + (block.rows.begin + r) * segment.row_stride;
      if (segment.column_stride != 0) {
        ScaleRow(row, columns, scale, from + block.columns.begin);
        scale = 1;
      } else if (std::isnormal(scale * *from)) {
        scale *= *from;
      } else {
        ScaleRow(row, columns, scale);
        scale = *from;
      }
    }
    ScaleRow(row, columns, scale);
  }
}

void ResultWriter::StoreSegmentBlock(const float* sums,
                                     int64_t sums_stride,
                                     const SegmentBlock& block) const {
  const int num_summands = 1 + static_cast<int>(addends_.size());
  Summand summands[1 + kMaxAddends];
  summands[0] = {sums, 4 * sums_stride, DType::kF32};
  const int num_stored = are_copies_ ? 1 : view_.num_replicas;
  for (int replica = 0; replica < num_stored; ++replica) {
    const int64_t index = IndexOf(replica, block);
    for (int i = 1; i < num_summands; ++i) {
      const AddendView& addend = addends_[i - 1];
      const AddendSegment& from = addend.segments[index];
      const int64_t bytes = SizeOf(addend.dtype);
      const int64_t offset = block.rows.begin * from.row_stride + block.columns.begin;
      summands[i] = {from.data + offset * bytes, from.row_stride * bytes, addend.dtype};
    }
    const BytesAt to = Find(replica, block);
    kernels_.sum(summands, num_summands, block.rows.size(), block.columns.size(),
                 to.data, to.row_stride, view_.dtype);
  }
}

int64_t ResultWriter::IndexOf(int replica, const SegmentBlock& block) const {
  return replica * num_row_segments_ * num_column_segments_ + block.segment;
}

ResultWriter::BytesAt ResultWriter::Find(int replica, const SegmentBlock& block) const {
  const Segment& to = view_.segments[IndexOf(replica, block)];
  const int64_t bytes = SizeOf(view_.dtype);
  return {to.data + (block.rows.begin * to.row_stride + block.columns.begin) * bytes,
          to.row_stride * bytes};
}

}  // namespace jax_ub
