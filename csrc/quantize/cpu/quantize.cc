#include "quantize/cpu/quantize.h"

#include <algorithm>
#include <atomic>
#include <bit>
#include <vector>

#include "gemm/cpu/isa.h"
#include "gemm/cpu/operand.h"
#include "platform/arithmetic_mode.h"

namespace jax_ub {

namespace {

// Number of elements of a unit. It takes about as long as it takes to wake a thread.
constexpr int64_t kUnitElements = int64_t{1} << 16;
// Approximate number of elements that a thread processes per microsecond with AVX512.
// Only the number of threads depends on it.
constexpr double kElementsPerUs = 3000;
constexpr int32_t kInfinity = 0x7f800000;
constexpr int32_t kLargestNan = 0x7fffffff;

void AtomicMax(int32_t* to, int32_t value) {
  const std::atomic_ref<int32_t> shared(*to);
  int32_t before = shared.load(std::memory_order_relaxed);
  while (before < value &&
         !shared.compare_exchange_weak(before, value, std::memory_order_relaxed)) {
  }
}

float PowerOfTwo(int exponent) {
  return std::bit_cast<float>(static_cast<uint32_t>(exponent + 127) << 23);
}

// Two factors whose product is 1 / scale. An e8m0 scale needs two factors, because
// 2^-127 is subnormal, and would be flushed to zero.
struct Factors {
  float first;
  float second;
};

Factors FactorsOf(DType dtype, const void* scales, int64_t index) {
  if (dtype == DType::kF32) return {1.0f / static_cast<const float*>(scales)[index], 1};
  const int exponent = 127 - static_cast<const uint8_t*>(scales)[index];
  return {PowerOfTwo(exponent >> 1), PowerOfTwo(exponent - (exponent >> 1))};
}

const void* ElementAt(const void* array, DType dtype, int64_t index) {
  return static_cast<const std::byte*>(array) + index * InfoOf(dtype).size_bytes;
}

}  // namespace

QuantizeUnits::QuantizeUnits(const ScaleLayout& layout)
    : layout_(layout), slice_columns_(layout.columns) {
  const int64_t of_group = std::max<int64_t>(layout.rows * layout.columns, 1);
  if (of_group > kUnitElements) {
    const int64_t columns = CeilDiv(layout.columns, CeilDiv(of_group, kUnitElements));
    slice_columns_ = RoundUp(columns, kQuantizeBlock);
    slices_ = CeilDiv(layout.columns, slice_columns_);
  } else {
    groups_per_unit_ = kUnitElements / of_group;
  }
  num_units_ = CeilDiv(layout.groups, groups_per_unit_) * slices_;
}

double QuantizeUnits::estimated_us() const {
  return static_cast<double>(layout_.num_elements()) / kElementsPerUs;
}

template <typename Function>
void QuantizeUnits::ForEachRow(int64_t unit, const Function& function) const {
  const auto [groups, rows, columns, per_column] = layout_;
  const int64_t first_column = unit % slices_ * slice_columns_;
  const int64_t num_columns = std::min(slice_columns_, columns - first_column);
  const int64_t first_group = unit / slices_ * groups_per_unit_;
  const int64_t end_group = std::min(first_group + groups_per_unit_, groups);
  for (int64_t g = first_group; g < end_group; ++g) {
    const int64_t scale = per_column ? g * columns + first_column : g;
    for (int64_t r = 0; r < rows; ++r) {
      function((g * rows + r) * columns + first_column, num_columns, scale);
    }
  }
}

void AmaxPass::Begin() const { std::fill_n(maxima, layout.num_scales(), 0); }

void AmaxPass::RunUnit(const QuantizeUnits& units, int64_t unit) const {
  const AmaxFunction amax = IsaInUse().general->amax[static_cast<int>(dtype)];
  const int32_t limit = keeps_nan ? kLargestNan : kInfinity;
  units.ForEachRow(unit, [&](int64_t element, int64_t count, int64_t scale) {
    const void* from = ElementAt(x, dtype, element);
    if (layout.per_column) {
      amax(from, count, true, limit, maxima + scale);
      return;
    }
    int32_t largest = 0;
    amax(from, count, false, limit, &largest);
    if (units.share_scales()) {
      AtomicMax(maxima + scale, largest);
    } else {
      maxima[scale] = std::max(maxima[scale], largest);
    }
  });
}

void CastPass::RunUnit(const QuantizeUnits& units, int64_t unit) const {
  const ArithmeticMode mode;
  const CastFunction cast =
      IsaInUse().general->cast[static_cast<int>(dtype)][static_cast<int>(fp8_dtype)];
  std::vector<float> first, second;  // the factors of the columns of a group
  int64_t group_scale = -1;          // the scale of the first column
  units.ForEachRow(unit, [&](int64_t element, int64_t count, int64_t scale) {
    const void* from = ElementAt(x, dtype, element);
    auto* const to = static_cast<uint8_t*>(values) + element;
    if (!layout.per_column) {
      const Factors factors = FactorsOf(scale_dtype, scales, scale);
      cast(from, count, &factors.first, &factors.second, false, to);
      return;
    }
    if (scale != group_scale) {
      const int64_t padded = RoundUp(count, kQuantizeBlock);
      first.resize(padded);
      second.resize(padded);
      for (int64_t c = 0; c < count; ++c) {
        const Factors factors = FactorsOf(scale_dtype, scales, scale + c);
        first[c] = factors.first;
        second[c] = factors.second;
      }
      group_scale = scale;
    }
    cast(from, count, first.data(), second.data(), true, to);
  });
}

}  // namespace jax_ub
