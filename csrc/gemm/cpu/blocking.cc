#include "gemm/cpu/blocking.h"

#include <algorithm>
#include <limits>
#include <mutex>
#include <vector>

#include "gemm/cpu/operand.h"
#include "gemm/cpu/small_m_plan.h"

namespace jax_ub {

namespace {

// Maximum number of rows and columns of a work unit. The limits bound the memory for
// sums (3 MiB) and for packed columns of B.
constexpr int64_t kMaxUnitRows = 768;
constexpr int64_t kMaxUnitColumns = 1024;
// Maximum size of a block of A. Such a block stays in the L2 cache while a unit is
// computed.
constexpr int64_t kMaxBlockRows = 192;
constexpr int64_t kMaxBlockBytes = 384 << 10;
// Minimum number of words in segments along K at whose ends K is cut into blocks, so
// that blocks can be read in place. If a segment is shorter, blocks span segments and
// are packed. The minimum is smaller for up to kFewRows rows, because packing then
// costs relatively more (Zen 4, segments of 96 words: the product takes 25 % longer
// with 64 rows, 5 % longer with 256, 2 % less with 1024). The rows are those of the
// whole problem, because the bits of the result must not depend on the division into
// units.
constexpr int64_t kMinSegmentWords = 128;
constexpr int64_t kMinSegmentWordsOfFewRows = 48;
constexpr int64_t kFewRows = 256;
// In products with at most kMaxRowsOfShortBlocks rows, a packed panel of B has at most
// kShortPanelBytes. Few rows use a panel only a few times, so writing it to the L2 cache
// and reading it again takes a large part of the time (a Xeon without AMX, gemm_bench 16
// 1024 704: bf16 15 % faster, f32 17 %; with 64 rows f32 7 %, bf16 2 to 11 % slower).
//
// If tiles can pack B, which is contiguous along N then, the panel and its source have at
// most kShortBlockBytes together, since the source of the next panel is prefetched to the
// L1 cache, too (the same Xeon, gemm_bench 16 1024 704 16 704 1024 16 2048 2048 9 1024 704
// 32 1024 704, NN: f32 3 to 35 % faster, bf16 at most 1 % slower and 14 % faster).
constexpr int64_t kMaxRowsOfShortBlocks = 32;
constexpr int64_t kShortPanelBytes = 32 << 10;
constexpr int64_t kShortBlockBytes = 40 << 10;
// The size of a block of K is a multiple of this, so that packing transposes whole
// vectors.
constexpr int64_t kBlockMultiple = 32;
// The time to pack one word of an operand, relative to one multiply-add of a tile.
constexpr int64_t kPackCost = 16;
// Bytes of B that one thread reads per microsecond in a product with few rows. Measured
// with tests/csrc/gemm_bench.cc on Zen 4, before its kernels prefetched: 8e3 to 18e3,
// depending on layout, dtype and number of rows.
constexpr double kSmallMBytesPerUs = 8e3;

int64_t PartOf(int64_t size, int64_t parts, int64_t multiple) {
  return RoundUp(CeilDiv(size, parts), multiple);
}

// Chooses the size of units, to minimize the time of the busiest worker:
//
//   ceil(units / workers) * (rows * columns + kPackCost * (rows + columns))
//
// The last term is the time to pack, since each unit packs the operands that it reads.
// Several workers get at least two units each, which balances their load. A single
// worker gets as few units as the workspace allows.
void ChooseUnits(const GemmProblem& problem,
                 const KernelSet& kernels,
                 int num_workers,
                 GemmBlocking& blocking) {
  const int64_t m = std::max<int64_t>(1, problem.m);
  const int64_t n = std::max<int64_t>(1, problem.n);
  const int64_t row_parts = CeilDiv(m, kMaxUnitRows);
  const int64_t column_parts = CeilDiv(n, kMaxUnitColumns);
  const int64_t most_units =
      CeilDiv(m, kernels.tile_rows) * CeilDiv(n, kernels.tile_columns);
  const int64_t fewest_units =
      num_workers == 1 ? 1 : std::min<int64_t>(2 * num_workers, most_units);
  int64_t least = std::numeric_limits<int64_t>::max();
  for (int64_t i = row_parts; i < row_parts + 4; ++i) {
    for (int64_t j = column_parts; j < column_parts + 8 + 2 * num_workers; ++j) {
      const int64_t rows = PartOf(m, i, kernels.tile_rows);
      const int64_t columns = PartOf(n, j, kernels.tile_columns);
      const int64_t units = CeilDiv(m, rows) * CeilDiv(n, columns);
      const int64_t rounds = CeilDiv(std::max(units, fewest_units), num_workers);
      const int64_t time = rounds * (rows * columns + kPackCost * (rows + columns));
      if (time < least) {
        least = time;
        blocking.unit_rows = rows;
        blocking.unit_columns = columns;
      }
    }
  }
}

// Returns the positions along K that may only be at the bounds of a block: 0, K, and
// the bounds of the segments of both operands. If a segment is short, returns only {0,
// K}, because tiles write their sums to memory after each block. If segments have
// different factors, returns all bounds.
std::vector<int64_t> ChooseCutsOfK(const GemmProblem& problem,
                                   const KernelSet& kernels) {
  std::vector<int64_t> cuts = problem.a.inner_bounds;
  const auto& others = problem.b.inner_bounds;
  cuts.insert(cuts.end(), others.begin(), others.end());
  std::sort(cuts.begin(), cuts.end());
  cuts.erase(std::unique(cuts.begin(), cuts.end()), cuts.end());
  if (problem.has_factors_by_k) return cuts;
  const int64_t shortest =
      (problem.m <= kFewRows ? kMinSegmentWordsOfFewRows : kMinSegmentWords) *
      kernels.k_per_word;
  for (size_t i = 1; i < cuts.size(); ++i) {
    if (cuts[i] - cuts[i - 1] < shortest) return {0, problem.k};
  }
  return cuts;
}

// Returns the maximum number of words in a block of K. Short blocks were not measured
// with AMX kernels, which do not pack A into panels.
int64_t MaxBlockWords(const GemmProblem& problem, const KernelSet& kernels) {
  if (problem.m > kMaxRowsOfShortBlocks || kernels.panel_of_a == 1) {
    return kernels.k_block;
  }
  const int64_t columns = kernels.tile_columns;
  if (IsContiguousAlongK(problem.b)) {
    return std::min<int64_t>(kernels.k_block, kShortPanelBytes / (4 * columns));
  }
  const int64_t word_bytes = 4 + kernels.k_per_word * SizeOf(problem.b.dtype);
  const int64_t words = kShortBlockBytes / (word_bytes * columns);
  return std::min<int64_t>(kernels.k_block, words / kBlockMultiple * kBlockMultiple);
}

// Divides K into blocks. If possible, each block is within one segment of both
// operands, so that it can be read in place, without packing.
void ChooseBlocksOfK(const GemmProblem& problem,
                     const KernelSet& kernels,
                     GemmBlocking& blocking) {
  const std::vector<int64_t> cuts = ChooseCutsOfK(problem, kernels);
  const int64_t most_words = MaxBlockWords(problem, kernels);
  blocking.k_bounds = {0};
  for (size_t i = 1; i < cuts.size(); ++i) {
    const int64_t size = cuts[i] - cuts[i - 1];
    const int64_t parts = CeilDiv(size, most_words * kernels.k_per_word);
    const int64_t block = PartOf(size, parts, kBlockMultiple);
    blocking.k_block = std::max(blocking.k_block, block);
    for (int64_t k = cuts[i - 1]; k < cuts[i];) {
      k = std::min(cuts[i], k + block);
      blocking.k_bounds.push_back(k);
    }
  }
  if (problem.k == 0) blocking.k_bounds = {0, 0};
}

}  // namespace

double EstimateCpuGemmUs(const GemmProblem& problem, const KernelSet& kernels) {
  const auto m = static_cast<double>(problem.m);
  const auto n = static_cast<double>(problem.n);
  const auto k = static_cast<double>(problem.k);
  if (problem.m <= 0 || problem.n <= 0) return 0;
  const double flops_per_us = kernels.gflops * 1e3;
  if (SmallMPlan::Supports(problem, kernels)) {
    return std::max(2 * m * n * k / flops_per_us,
                    n * k * SizeOf(problem.b.dtype) / kSmallMBytesPerUs);
  }
  return 2 * (m * n + kPackCost * (m + n)) * k / flops_per_us;
}

GemmBlocking ChooseBlocking(const GemmProblem& problem,
                            const KernelSet& kernels,
                            int num_workers) {
  GemmBlocking blocking;
  ChooseUnits(problem, kernels, num_workers, blocking);
  ChooseBlocksOfK(problem, kernels, blocking);
  const int64_t row_bytes =
      4 * std::max<int64_t>(1, blocking.k_block / kernels.k_per_word);
  const int64_t most_rows = std::min(kMaxBlockRows, kMaxBlockBytes / row_bytes);
  const int64_t row_blocks = CeilDiv(blocking.unit_rows, most_rows);
  blocking.block_rows = PartOf(blocking.unit_rows, row_blocks, kernels.tile_rows);
  return blocking;
}

GemmBlocking BlockingCache::Get(const GemmProblem& problem,
                                const KernelSet& kernels,
                                int num_workers) {
  const KernelSet* const address = &kernels;
  const DType dtype = problem.b.dtype;
  const bool is_k_contiguous = IsContiguousAlongK(problem.b);
  const auto key =
      std::tie(problem.m, problem.n, problem.has_factors_by_k, dtype, is_k_contiguous,
               address, num_workers, problem.a.inner_bounds, problem.b.inner_bounds);
  {
    std::shared_lock lock(mutex_);
    const auto found = entries_.find(key);
    if (found != entries_.end()) return found->second;
  }
  ++num_chosen_;
  GemmBlocking blocking = ChooseBlocking(problem, kernels, num_workers);
  std::lock_guard lock(mutex_);
  if (entries_.size() == kMaxEntries) entries_.clear();
  entries_.insert_or_assign(key, blocking);
  return blocking;
}

}  // namespace jax_ub
