#include "gemm/cpu/plan.h"

#include <algorithm>
#include <utility>

#include "gemm/check_problem.h"
#include "gemm/cpu/few_rows_plan.h"
#include "gemm/cpu/flush_subnormals.h"

namespace jax_ub {

std::unique_ptr<GemmPlan> PlanGemm(GemmProblem problem, int num_workers) {
  const KernelSet& kernels = KernelsFor(IsaInUse(), problem.a.dtype, problem.b.dtype);
  return PlanCpuGemm(std::move(problem), kernels, num_workers);
}

std::unique_ptr<GemmPlan> PlanCpuGemm(GemmProblem problem,
                                      const KernelSet& kernels,
                                      int num_workers) {
  if (problem.m <= kMaxFewRows) {
    return std::make_unique<FewRowsPlan>(std::move(problem), kernels, num_workers);
  }
  return std::make_unique<TiledPlan>(std::move(problem), kernels, num_workers);
}

TiledPlan::TiledPlan(GemmProblem problem, const KernelSet& kernels, int num_workers)
    : problem_(Checked(std::move(problem))),
      kernels_(kernels),
      blocking_(ChooseBlocking(problem_, kernels, std::max(1, num_workers))),
      a_(problem_.a, kernels, kernels.pack_a, kernels.tile_rows),
      b_(problem_.b, kernels, kernels.pack_b, kernels.tile_columns),
      c_(problem_, kernels),
      num_unit_rows_(CeilDiv(problem_.m, blocking_.unit_rows)),
      num_unit_columns_(CeilDiv(problem_.n, blocking_.unit_columns)) {}

// Units that are neighbours in the list share columns of B, the operand that is packed.
void TiledPlan::Run(int64_t unit, Scratch& scratch) const {
  const FlushSubnormals flush;
  const int64_t row = unit % num_unit_rows_ * blocking_.unit_rows;
  const int64_t column = unit / num_unit_rows_ * blocking_.unit_columns;
  const Range rows = {row, std::min(problem_.m, row + blocking_.unit_rows)};
  const Range columns = {column, std::min(problem_.n, column + blocking_.unit_columns)};

  const int64_t a_tiles = CeilDiv(blocking_.block_rows, kernels_.tile_rows);
  const int64_t b_tiles = CeilDiv(blocking_.group_columns, kernels_.tile_columns);
  const int64_t a_bytes = RoundUp(a_tiles * a_.PanelBytes(blocking_.k_block), 4096);
  const int64_t b_bytes = RoundUp(b_tiles * b_.PanelBytes(blocking_.k_block), 4096);
  const bool is_one_block = problem_.k <= blocking_.k_block;
  const int64_t tiles = is_one_block
                            ? 1
                            : CeilDiv(rows.size(), kernels_.tile_rows) *
                                  CeilDiv(columns.size(), kernels_.tile_columns);
  const int64_t sum_bytes = 4 * tiles * kernels_.tile_rows * kernels_.tile_columns;
  std::byte* base = scratch.Reserve(a_bytes + b_bytes + sum_bytes);
  const Workspace workspace = {base, base + a_bytes,
                               reinterpret_cast<float*>(base + a_bytes + b_bytes)};

  // K = 0 still stores the addends.
  int64_t k = 0;
  do {
    const Range block = {k, std::min(problem_.k, k + blocking_.k_block)};
    RunBlock(rows, columns, block, workspace);
    k = block.end;
  } while (k < problem_.k);
}

void TiledPlan::RunBlock(Range rows,
                         Range columns,
                         Range k,
                         const Workspace& workspace) const {
  const int64_t tile_rows = kernels_.tile_rows;
  const int64_t tile_columns = kernels_.tile_columns;
  const int64_t tile_size = tile_rows * tile_columns;
  const int64_t row_tiles = CeilDiv(rows.size(), tile_rows);
  const bool is_one_block = k.begin == 0 && k.end == problem_.k;
  std::vector<TileOfA> tiles(CeilDiv(blocking_.block_rows, tile_rows));
  const bool reads_a_once = rows.size() <= blocking_.block_rows;
  if (reads_a_once) ReadA(rows, k, workspace.packed_a, tiles.data());

  for (int64_t g = columns.begin; g < columns.end; g += blocking_.group_columns) {
    const Range group = {g, std::min(columns.end, g + blocking_.group_columns)};
    b_.PackPanels(group, k, workspace.packed_b);
    for (int64_t r = rows.begin; r < rows.end; r += blocking_.block_rows) {
      const Range block = {r, std::min(rows.end, r + blocking_.block_rows)};
      if (!reads_a_once) ReadA(block, k, workspace.packed_a, tiles.data());
      const std::byte* panel = workspace.packed_b;
      for (int64_t c = group.begin; c < group.end; c += tile_columns) {
        const Range tile_range = {c, std::min(group.end, c + tile_columns)};
        const TileOfA* a = tiles.data();
        float* sums = workspace.sums;
        if (!is_one_block) {
          sums += ((c - columns.begin) / tile_columns * row_tiles +
                   (r - rows.begin) / tile_rows) *
                  tile_size;
        }
        // What a tile writes is on its way while the one before is multiplied.
        Prefetch({block.begin, std::min(block.end, block.begin + tile_rows)},
                 tile_range, k);
        for (int64_t i = block.begin; i < block.end; i += tile_rows) {
          const int64_t end = std::min(block.end, i + tile_rows);
          Prefetch({end, std::min(block.end, end + tile_rows)}, tile_range, k);
          MultiplyTile(*a++, panel, {i, end}, tile_range, k, sums);
          if (!is_one_block) sums += tile_size;
        }
        panel += b_.PanelBytes(k.size());
      }
    }
  }
}

void TiledPlan::ReadA(Range block, Range k, std::byte* packed, TileOfA* tiles) const {
  if (!a_.has_rows()) a_.PackPanels(block, k, packed);
  const int64_t panel_bytes = a_.PanelBytes(k.size());
  for (int64_t i = block.begin; i < block.end; i += kernels_.tile_rows) {
    const Range outer = {i, std::min(block.end, i + kernels_.tile_rows)};
    *tiles++ = a_.has_rows() ? a_.ReadRows(outer, k, packed)
                             : TileOfA{packed, 4 * kernels_.tile_rows};
    packed += panel_bytes;
  }
}

void TiledPlan::Prefetch(Range rows, Range columns, Range k) const {
  if (k.end == problem_.k && rows.size() > 0) c_.Prefetch(rows, columns);
}

void TiledPlan::MultiplyTile(const TileOfA& a,
                             const std::byte* b,
                             Range rows,
                             Range columns,
                             Range k,
                             float* sums) const {
  const int64_t b_stride = 4 * kernels_.tile_columns;
  TileOutput output = {
      .to = sums,
      .to_stride = b_stride,
      .to_dtype = DType::kF32,
      .before = k.begin > 0 ? sums : nullptr,
      .after = nullptr,
      .after_stride = 0,
      .after_dtype = DType::kF32,
  };
  const bool is_last = k.end == problem_.k;
  const bool is_whole = columns.size() == kernels_.tile_columns;
  const bool is_stored = is_last && is_whole && c_.FindOutput(rows, columns, output);
  const TileFunction* tiles =
      a_.has_rows() ? kernels_.tile_of_rows : kernels_.tile_of_columns;
  tiles[rows.size() - 1](a.words, a.stride, b, b_stride,
                         kernels_.k_group == 1 ? k.size() : CeilDiv(k.size(), 2),
                         output);
  if (is_last && !is_stored) c_.Store(sums, kernels_.tile_columns, rows, columns);
}

}  // namespace jax_ub
