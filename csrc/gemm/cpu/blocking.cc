#include <algorithm>
#include <limits>

#include "gemm/cpu/plan.h"

namespace jax_ub {

namespace {

// The most that a unit's sums (3 MiB) and packed columns may take.
constexpr int64_t kMaxUnitRows = 768;
constexpr int64_t kMaxUnitColumns = 1024;
// Rows of A that stay in the second cache while the columns of a unit pass by.
constexpr int64_t kBlockRows = 192;
// What packing a word costs, in multiply-adds of a tile.
constexpr int64_t kPackCost = 16;

int64_t PartOf(int64_t size, int64_t parts, int64_t multiple) {
  return RoundUp(CeilDiv(size, parts), multiple);
}

// Chooses the grid of units with the least time for the busiest worker,
//   ceil(units / workers) * (rows * columns + kPackCost * (rows + columns)),
// since every unit packs what it reads. Two units a worker or more even out workers that
// are held up.
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
  const int64_t fewest_units = std::min<int64_t>(2 * num_workers, most_units);
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

}  // namespace

GemmBlocking ChooseBlocking(const GemmProblem& problem,
                            const KernelSet& kernels,
                            int num_workers) {
  GemmBlocking blocking = {};
  ChooseUnits(problem, kernels, num_workers, blocking);
  // Blocks of K of equal size, each a multiple of the vectors that packing transposes.
  const int64_t k = std::max<int64_t>(1, problem.k);
  const int64_t k_limit = kernels.k_block * kernels.k_group;
  blocking.k_block = PartOf(k, CeilDiv(k, k_limit), 32);
  const int64_t row_blocks = CeilDiv(blocking.unit_rows, kBlockRows);
  blocking.block_rows = PartOf(blocking.unit_rows, row_blocks, kernels.tile_rows);
  return blocking;
}

}  // namespace jax_ub
