#include "gemm/cpu/plan.h"

#include <algorithm>
#include <utility>

#include "gemm/cpu/small_m_plan.h"
#include "platform/arithmetic_mode.h"

namespace jax_ub {

namespace {

// Number of columns of B that are packed at a time, if B is contiguous along N and no
// tile kernel can pack it.
constexpr int64_t kGroupColumns = 128;
// Maximum number of row tiles for which the first row tile also prefetches the next
// panel of B. If the first row tile packs the current panel while it multiplies, it
// already waits for memory. With more row tiles, only the later ones therefore prefetch
// (2 % faster with 64 rows of A). With few row tiles, as for 6 or 16 rows of A, the
// later ones are too few to prefetch the panel in time.
constexpr int64_t kFewTiles = 6;

GemmBlocking BlockingFor(const GemmProblem& problem,
                         const KernelSet& kernels,
                         const Workers& workers) {
  const int num_workers = std::max(1, workers.num);
  return workers.blockings != nullptr
             ? workers.blockings->Get(problem, kernels, num_workers)
             : ChooseBlocking(problem, kernels, num_workers);
}

// Replaces the factors of segments along K by factors of the whole sums, if all segments
// have the same factor. One multiplication of each sum is then enough, and the blocks of
// K may contain several segments.
void MergeEqualFactors(GemmProblem& problem) {
  if (!problem.has_factors_by_k) return;
  const size_t num_parts = problem.a.inner_bounds.size() - 1;
  for (const FactorView& factor : problem.factors) {
    const size_t num_segments = factor.segments.size() / num_parts;
    for (size_t i = 0; i < factor.segments.size(); ++i) {
      const FactorSegment& segment = factor.segments[i];
      const FactorSegment& first = factor.segments[i % num_segments];
      if (!segment.is_one() || *segment.data != *first.data) return;
    }
  }
  for (FactorView& factor : problem.factors) {
    factor.segments.resize(factor.segments.size() / num_parts);
  }
  problem.has_factors_by_k = false;
}

}  // namespace

std::unique_ptr<GemmPlan> PlanGemm(GemmProblem problem, const Workers& workers) {
  const KernelSet& kernels = KernelsFor(IsaInUse(), problem.a.dtype, problem.b.dtype);
  return PlanCpuGemm(std::move(problem), kernels, workers);
}

double EstimateGemmUs(const GemmProblem& problem) {
  return EstimateCpuGemmUs(problem,
                           KernelsFor(IsaInUse(), problem.a.dtype, problem.b.dtype));
}

std::unique_ptr<GemmPlan> PlanCpuGemm(GemmProblem problem,
                                      const KernelSet& kernels,
                                      const Workers& workers) {
  CheckProblem(problem);
  MergeEqualFactors(problem);
  if (SmallMPlan::Supports(problem, kernels)) {
    return std::make_unique<SmallMPlan>(std::move(problem), kernels, workers.num);
  }
  return std::make_unique<TiledPlan>(std::move(problem), kernels, workers);
}

TiledPlan::TiledPlan(GemmProblem problem,
                     const KernelSet& kernels,
                     const Workers& workers)
    : problem_(std::move(problem)),
      kernels_(kernels),
      blocking_(BlockingFor(problem_, kernels, workers)),
      a_(problem_.a, kernels, kernels.pack_a, kernels.panel_of_a),
      b_(problem_.b, kernels, kernels.pack_b, kernels.tile_columns),
      c_(problem_, kernels),
      tile_floats_(kernels.tile_rows * kernels.tile_columns),
      sums_step_(blocking_.num_k_blocks() > 1 || c_.stores_rows() ? tile_floats_ : 0),
      num_unit_rows_(CeilDiv(problem_.m, blocking_.unit_rows)),
      num_unit_columns_(CeilDiv(problem_.n, blocking_.unit_columns)) {}

// Runs one unit, which computes a block of C. Consecutive units use the same columns of
// B, because packing B takes longer than packing A.
void TiledPlan::Run(int64_t unit, Scratch& scratch) const {
  const ArithmeticMode mode;
  const ScopedKernelState at_work(kernels_);
  const int64_t row = unit % num_unit_rows_ * blocking_.unit_rows;
  const int64_t column = unit / num_unit_rows_ * blocking_.unit_columns;
  const Range rows = {row, std::min(problem_.m, row + blocking_.unit_rows)};
  const Range columns = {column, std::min(problem_.n, column + blocking_.unit_columns)};

  const int64_t a_tiles = CeilDiv(blocking_.block_rows, kernels_.tile_rows);
  // Number of packed columns of B that the workspace holds: one group, or all columns
  // if several blocks of rows use them.
  const int64_t b_columns =
      rows.size() <= blocking_.block_rows ? kGroupColumns : columns.size();
  const int64_t b_tiles = CeilDiv(b_columns, kernels_.tile_columns);
  const int64_t a_bytes = RoundUp(a_tiles * TileBytesOfA(blocking_.k_block), 4096);
  const int64_t b_bytes = RoundUp(b_tiles * b_.PanelBytes(blocking_.k_block), 4096);
  const int64_t column_tiles = CeilDiv(columns.size(), kernels_.tile_columns);
  const int64_t tiles = CeilDiv(RowsOfSums(rows), kernels_.tile_rows) * column_tiles;
  const int64_t sum_floats = std::max(tile_floats_, tiles * sums_step_);
  const int64_t row_floats = c_.stores_rows() ? column_tiles * tile_floats_ : 0;
  std::byte* base = scratch.Reserve(a_bytes + b_bytes + 4 * (sum_floats + row_floats));
  float* sums = reinterpret_cast<float*>(base + a_bytes + b_bytes);
  const Workspace workspace = {base, base + a_bytes, sums, sums + sum_floats};

  // If K = 0, there is one block of size 0, so that the addends are stored.
  const int64_t num_blocks = blocking_.num_k_blocks();
  for (int64_t i = 0; i < num_blocks; ++i) RunBlock(rows, columns, i, workspace);
}

int64_t TiledPlan::RowsOfSums(Range rows) const {
  return blocking_.num_k_blocks() > 1 ? rows.size()
                                      : std::min(rows.size(), blocking_.block_rows);
}

Range TiledPlan::BlockOfK(int64_t k_index) const {
  const auto& bounds = blocking_.k_bounds;
  if (k_index == blocking_.num_k_blocks()) return {};
  return {bounds[k_index], bounds[k_index + 1]};
}

void TiledPlan::RunBlock(Range rows,
                         Range columns,
                         int64_t k_index,
                         const Workspace& workspace) const {
  const Range k = BlockOfK(k_index);
  const Range next_k = BlockOfK(k_index + 1);
  const int64_t tile_rows = kernels_.tile_rows;
  const int64_t tile_columns = kernels_.tile_columns;
  const int64_t row_tiles = CeilDiv(RowsOfSums(rows), tile_rows);
  const bool reads_a_once = rows.size() <= blocking_.block_rows;
  std::vector<ATile> tiles(CeilDiv(blocking_.block_rows, tile_rows));
  for (int64_t r = rows.begin; r < rows.end; r += blocking_.block_rows) {
    const Range block = {r, std::min(rows.end, r + blocking_.block_rows)};
    ReadA(block, k, workspace.packed_a, tiles.data());
    float* block_sums =
        workspace.sums + (r - rows.begin) / tile_rows % row_tiles * sums_step_;
    std::byte* packed_b = workspace.packed_b;
    int64_t read_end = r == rows.begin ? columns.begin : columns.end;
    for (int64_t c = columns.begin; c < columns.end; c += tile_columns) {
      const Range tile_range = {c, std::min(columns.end, c + tile_columns)};
      const bool is_read = c < read_end;
      if (!is_read && reads_a_once) packed_b = workspace.packed_b;
      BPanelState b = {.panel = {packed_b}};
      if (!is_read) {
        read_end = ReadB(columns, tile_range, k, next_k, block.size(), b);
      }
      const int64_t column_tile = (c - columns.begin) / tile_columns;
      MultiplyPanel(tiles.data(), b, block, tile_range, k,
                    block_sums + column_tile * row_tiles * sums_step_);
      packed_b += b_.PanelBytes(k.size());
    }
    if (k.end < problem_.k) continue;
    if (c_.stores_rows()) {
      StoreRows(block, columns, block_sums, row_tiles, workspace.rows);
    }
    c_.CopyReplicas(block, columns);
  }
}

void TiledPlan::StoreRows(Range block,
                          Range columns,
                          const float* sums,
                          int64_t row_tiles,
                          float* rows) const {
  const int64_t tile_columns = kernels_.tile_columns;
  const int64_t column_tiles = CeilDiv(columns.size(), tile_columns);
  for (int64_t i = block.begin; i < block.end; i += kernels_.tile_rows) {
    const Range tile = {i, std::min(block.end, i + kernels_.tile_rows)};
    float* row = rows;
    for (int64_t r = 0; r < tile.size(); ++r) {
      const float* from = sums + r * tile_columns;
      for (int64_t c = 0; c < column_tiles; ++c) {
        row = std::copy_n(from + c * row_tiles * sums_step_, tile_columns, row);
      }
    }
    c_.Store(rows, column_tiles * tile_columns, tile, columns);
    sums += sums_step_;
  }
}

int64_t TiledPlan::ReadB(Range unit,
                         Range columns,
                         Range k,
                         Range next_k,
                         int64_t num_rows,
                         BPanelState& b) const {
  const bool is_whole =
      num_rows >= kernels_.tile_rows && columns.size() == kernels_.tile_columns &&
      problem_.b.scales.empty() &&
      kernels_.packing_tile_of_rows[static_cast<int>(problem_.b.dtype)] != nullptr;
  if (is_whole) b_.FindSource(columns, k, b.panel);
  const bool packs_now = b.panel.source == nullptr;
  if (packs_now) {
    if (!b_.is_k_contiguous()) {
      columns.end = std::min(unit.end, columns.begin + kGroupColumns);
    }
    b_.PackPanels(columns, k, static_cast<std::byte*>(b.panel.words));
  }

  int64_t tiles = CeilDiv(num_rows, kernels_.tile_rows);
  b.prefetch_in_packing_tile = tiles <= kFewTiles;
  if (!packs_now && !b.prefetch_in_packing_tile) --tiles;
  Range next = {columns.end, std::min(unit.end, columns.end + kernels_.tile_columns)};
  if (columns.end == unit.end) {
    next = {unit.begin, std::min(unit.end, unit.begin + kernels_.tile_columns)};
  } else {
    next_k = k;
  }
  const int64_t steps = CeilDiv(CeilDiv(k.size(), kernels_.k_per_word), kStepWords);
  b.prefetch =
      next_k.size() > 0 ? b_.LinesOf(next, next_k, tiles * steps) : PrefetchCursor{};
  return columns.end;
}

void TiledPlan::MultiplyPanel(const ATile* a,
                              BPanelState& b,
                              Range rows,
                              Range columns,
                              Range k,
                              float* sums) const {
  const int64_t tile_rows = kernels_.tile_rows;
  // Prefetches the memory where the first tile will be stored. The loop prefetches for
  // each later tile while the previous tile is multiplied.
  Prefetch({rows.begin, std::min(rows.end, rows.begin + tile_rows)}, columns, k);
  for (int64_t i = rows.begin; i < rows.end; i += tile_rows) {
    const int64_t end = std::min(rows.end, i + tile_rows);
    Prefetch({end, std::min(rows.end, end + tile_rows)}, columns, k);
    MultiplyTile(*a++, b, {i, end}, columns, k, sums);
    b.panel.source = nullptr;
    sums += sums_step_;
  }
}

void TiledPlan::ReadA(Range block, Range k, std::byte* packed, ATile* tiles) const {
  if (!a_.reads_rows()) a_.PackPanels(block, k, packed);
  const int64_t tile_bytes = TileBytesOfA(k.size());
  for (int64_t i = block.begin; i < block.end; i += kernels_.tile_rows) {
    const Range outer = {i, std::min(block.end, i + kernels_.tile_rows)};
    *tiles++ = a_.reads_rows() ? a_.ReadRows(outer, k, packed)
                               : a_.PackedTile(packed, k.size());
    packed += tile_bytes;
  }
}

void TiledPlan::Prefetch(Range rows, Range columns, Range k) const {
  if (k.end == problem_.k && rows.size() > 0) c_.Prefetch(rows, columns);
}

void TiledPlan::MultiplySegment(const TileFunction tile,
                                const ATile& a,
                                BPanelState& b,
                                Range rows,
                                Range columns,
                                Range k,
                                PrefetchCursor& prefetch,
                                float* sums) const {
  alignas(64) float product[kMaxTileRows * kMaxTileColumns];
  const int64_t stride = kernels_.tile_columns;
  const TileOutput output = {.to = product, .to_stride = 4 * stride};
  tile(a.words, a.stride, b.panel, CeilDiv(k.size(), kernels_.k_per_word), output,
       prefetch);
  if (k.size() > 0) {
    c_.Scale(FindSegment(problem_.a.inner_bounds, k.begin), product, stride, rows,
             columns);
  }
  const int64_t size = rows.size() * stride;
  if (k.begin == 0) {
    std::copy_n(product, size, sums);
  } else {
    for (int64_t i = 0; i < size; ++i) sums[i] += product[i];
  }
}

void TiledPlan::MultiplyTile(const ATile& a,
                             BPanelState& b,
                             Range rows,
                             Range columns,
                             Range k,
                             float* sums) const {
  TileOutput output = {.to = sums,
                       .to_stride = 4 * kernels_.tile_columns,
                       .before = k.begin > 0 ? sums : nullptr};
  const bool is_last = k.end == problem_.k;
  const bool is_whole =
      columns.size() == kernels_.tile_columns && rows.size() % kernels_.whole_rows == 0;
  const bool is_stored = is_last && is_whole && c_.FindOutput(rows, columns, output);
  const bool has_rows = a_.has_rows();
  const TileFunction* tiles =
      has_rows ? kernels_.tile_of_rows : kernels_.tile_of_columns;
  const TileFunction* packing_tiles =
      has_rows ? kernels_.packing_tile_of_rows : kernels_.packing_tile_of_columns;
  const bool packs = b.panel.source != nullptr;
  const TileFunction tile = packs ? packing_tiles[static_cast<int>(problem_.b.dtype)]
                                  : tiles[rows.size() - 1];
  PrefetchCursor nothing;
  PrefetchCursor& prefetch =
      packs && !b.prefetch_in_packing_tile ? nothing : b.prefetch;
  if (c_.has_factors_by_k()) {
    MultiplySegment(tile, a, b, rows, columns, k, prefetch, sums);
  } else {
    tile(a.words, a.stride, b.panel, CeilDiv(k.size(), kernels_.k_per_word), output,
         prefetch);
  }
  if (is_last && !is_stored && !c_.stores_rows()) {
    c_.Store(sums, kernels_.tile_columns, rows, columns);
  }
}

}  // namespace jax_ub
