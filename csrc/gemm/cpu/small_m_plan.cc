#include "gemm/cpu/small_m_plan.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "platform/arithmetic_mode.h"

namespace jax_ub {

namespace {

// Returns the number of columns of a work unit, whose sums fit into the L1 cache. If
// possible, each worker gets several units, which balances the load.
int64_t BlockColumns(int64_t n, int num_workers) {
  const int64_t even = num_workers <= 1 ? n : CeilDiv(n, 4 * num_workers);
  return std::clamp<int64_t>(RoundUp(even, 64), 128, 1024);
}

// Returns the kernel for products of `m` rows that can read B in the layout of
// `segment`. Returns null if there is none.
SmallMFunction FindKernel(const KernelSet& kernels,
                          int64_t m,
                          DType dtype,
                          const ConstSegment& segment) {
  const SmallMKernels& found = kernels.small_m[m - 1];
  const bool is_k_contiguous = segment.inner_stride == 1;
  return (is_k_contiguous ? found.dots : found.column_blocks)[static_cast<int>(dtype)];
}

}  // namespace

bool SmallMPlan::Supports(const GemmProblem& problem, const KernelSet& kernels) {
  const OperandView& b = problem.b;
  if (problem.m < 1 || problem.m > kMaxSmallM || problem.has_factors_by_k ||
      !problem.a.scales.empty() || !b.scales.empty()) {
    return false;
  }
  return std::all_of(
      b.segments.begin(), b.segments.end(), [&](const ConstSegment& segment) {
        return FindKernel(kernels, problem.m, b.dtype, segment) != nullptr;
      });
}

SmallMPlan::SmallMPlan(GemmProblem problem, const KernelSet& kernels, int num_workers)
    : problem_(std::move(problem)),
      kernels_(kernels),
      c_(problem_, kernels),
      column_block_(BlockColumns(problem_.n, num_workers)) {}

int64_t SmallMPlan::num_units() const { return CeilDiv(problem_.n, column_block_); }

void SmallMPlan::Run(int64_t unit, Scratch& scratch) const {
  const ArithmeticMode mode;
  const Range columns = {unit * column_block_,
                         std::min(problem_.n, (unit + 1) * column_block_)};
  const int64_t sums_bytes = RoundUp(4 * problem_.m * column_block_, 64);
  std::byte* sums = scratch.Reserve(sums_bytes + 4 * problem_.m * problem_.k);
  std::byte* a = sums + sums_bytes;
  std::memset(sums, 0, sums_bytes);
  WidenA(a);
  const auto& bounds = problem_.b.outer_bounds;
  const int64_t num_k_segments = problem_.b.inner_bounds.size() - 1;
  for (int64_t i = FindSegment(bounds, columns.begin);
       i + 1 < static_cast<int64_t>(bounds.size()) && bounds[i] < columns.end; ++i) {
    for (int64_t j = 0; j < num_k_segments; ++j) AddSegment(i, j, columns, a, sums);
  }
  c_.Store(reinterpret_cast<float*>(sums), column_block_, {0, problem_.m}, columns);
  c_.CopyReplicas({0, problem_.m}, columns);
}

void SmallMPlan::WidenA(std::byte* rows) const {
  const OperandView& a = problem_.a;
  const int64_t bytes = SizeOf(a.dtype);
  const ConstSegment* segment = a.segments.data();
  for (size_t i = 0; i + 1 < a.outer_bounds.size(); ++i) {
    for (size_t j = 0; j + 1 < a.inner_bounds.size(); ++j, ++segment) {
      const int64_t k = a.inner_bounds[j];
      const int64_t num_k = a.inner_bounds[j + 1] - k;
      const bool is_row = segment->inner_stride == 1;
      for (int64_t m = a.outer_bounds[i]; m < a.outer_bounds[i + 1]; ++m) {
        const std::byte* from =
            segment->data + (m - a.outer_bounds[i]) * segment->outer_stride * bytes;
        std::byte* to = rows + 4 * (m * problem_.k + k);
        // The elements of a contiguous row are converted in one call. The elements of a
        // strided row are converted as num_k rows of one element.
        const Summand summand = {from, segment->inner_stride * bytes, a.dtype};
        const int64_t lines = is_row ? 1 : num_k;
        kernels_.sum(&summand, 1, lines, is_row ? num_k : 1, to, 4, DType::kF32);
      }
    }
  }
}

void SmallMPlan::AddSegment(int64_t column_segment,
                            int64_t k_segment,
                            Range columns,
                            const std::byte* a,
                            std::byte* sums) const {
  const OperandView& b = problem_.b;
  const int64_t num_k_segments = b.inner_bounds.size() - 1;
  const ConstSegment& segment = b.segments[column_segment * num_k_segments + k_segment];
  const int64_t first = b.outer_bounds[column_segment];
  const Range own = {std::max(columns.begin, first),
                     std::min(columns.end, b.outer_bounds[column_segment + 1])};
  const int64_t k = b.inner_bounds[k_segment];
  const int64_t num_k = b.inner_bounds[k_segment + 1] - k;
  if (own.size() <= 0 || num_k == 0) return;
  const int64_t bytes = SizeOf(b.dtype);
  const bool is_k_contiguous = segment.inner_stride == 1;
  const SmallMFunction multiply = FindKernel(kernels_, problem_.m, b.dtype, segment);
  const int64_t stride = is_k_contiguous ? segment.outer_stride : segment.inner_stride;
  multiply(a + 4 * k, 4 * problem_.k,
           segment.data + (own.begin - first) * segment.outer_stride * bytes,
           stride * bytes, num_k, own.size(), sums + 4 * (own.begin - columns.begin),
           4 * column_block_);
}

}  // namespace jax_ub
