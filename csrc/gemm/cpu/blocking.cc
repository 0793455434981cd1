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
// Maximum number of rows of a block of A, and maximum size of a block in bytes. The
// block stays in the L2 cache while a unit is computed.
constexpr int64_t kMaxBlockRows = 192;
constexpr int64_t kMaxBlockBytes = 384 << 10;
// Blocks of K end where the segments of A and B end, if every segment has at least
// kMinSegmentWords words along K. Such blocks can be read in place. With shorter
// segments, blocks span several segments and are packed. Packing takes a larger part of
// the time if there are few rows, so the minimum is smaller for up to kFewRows rows
// (Zen 4, segments of 96 words: with packing, the product takes 25 % longer for 64 rows
// and 5 % longer for 256 rows, but 2 % less for 1024 rows). The rows are those of the
// whole product, not of a unit, because the bits of the result must not depend on the
// division into units.
constexpr int64_t kMinSegmentWords = 128;
constexpr int64_t kMinSegmentWordsOfFewRows = 48;
constexpr int64_t kFewRows = 256;
// Products with at most kMaxRowsOfShortBlocks rows have short blocks of K: a packed
// panel of B has at most kShortPanelBytes bytes. Few rows use a panel only a few times,
// so writing a longer panel to the L2 cache and reading it again would take a large
// part of the time. Measured with gemm_bench 16 1024 704 on a Xeon without AMX, short
// blocks make bf16 15 % and f32 17 % faster. With 64 rows, they would make f32 7 % and
// bf16 2 to 11 % slower.
//
// If B is contiguous along N, tile kernels can pack it. The panel and its source then
// have at most kShortBlockBytes bytes together, because the source of the next panel is
// prefetched to the L1 cache. Measured on the same Xeon with gemm_bench 16 1024 704 16
// 704 1024 16 2048 2048 9 1024 704 32 1024 704 (layout NN), this makes f32 3 to 35 %
// faster, and bf16 between 1 % slower and 14 % faster.
constexpr int64_t kMaxRowsOfShortBlocks = 32;
constexpr int64_t kShortPanelBytes = 32 << 10;
constexpr int64_t kShortBlockBytes = 40 << 10;
// Block sizes along K are multiples of this number, so that packing transposes whole
// vectors. Only the last block of a segment may be smaller.
constexpr int64_t kBlockMultiple = 32;
// Estimated time to pack one word of an operand. The unit is the time of one
// multiply-add of a tile kernel.
constexpr int64_t kPackCost = 16;
// Bytes of B that one thread reads per microsecond in a product with few rows. This is
// the lowest rate that tests/csrc/gemm_bench.cc measured on Zen 4 with kernels that do
// not prefetch: 8e3 to 18e3, depending on layout, dtype and number of rows.
constexpr double kSmallMBytesPerUs = 8e3;

int64_t PartOf(int64_t size, int64_t parts, int64_t multiple) {
  return RoundUp(CeilDiv(size, parts), multiple);
}

// Chooses the unit size that minimizes the estimated time of the busiest worker:
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

// Returns the positions along K at which a block must begin or end: 0, K, and the
// bounds of the segments of both operands. If a segment is short, returns only {0, K},
// because short blocks are slow: tiles write their sums to memory after each block. If
// each segment has its own factors, always returns all bounds, because the sum over a
// segment is multiplied by them.
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

// Returns the maximum number of words in a block of K. Products with few rows have
// short blocks, except with AMX kernels (panel_of_a is 1), for which short blocks were
// not measured.
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
