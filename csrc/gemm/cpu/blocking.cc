#include <algorithm>

#include "gemm/cpu/plan.h"

namespace jax_ub {

namespace {

// Splits `size` into equal parts of at most `limit`, in multiples of `multiple`.
int64_t EqualPart(int64_t size, int64_t limit, int64_t multiple) {
  const int64_t parts = std::max<int64_t>(1, CeilDiv(size, limit));
  return RoundUp(CeilDiv(size, parts), multiple);
}

}  // namespace

GemmBlocking ChooseBlocking(const GemmProblem& problem,
                            const KernelSet& kernels,
                            int num_workers) {
  const int64_t m = std::max<int64_t>(1, problem.m);
  const int64_t n = std::max<int64_t>(1, problem.n);
  const int64_t rows = kernels.tile_rows;
  const int64_t columns = kernels.tile_columns;
  GemmBlocking blocking;
  blocking.k_block = EqualPart(std::max<int64_t>(1, problem.k), kernels.k_block * kernels.k_group, 4);
  blocking.unit_rows = EqualPart(m, 768, rows);
  blocking.unit_columns = EqualPart(n, 1024, columns);
  while (CeilDiv(m, blocking.unit_rows) * CeilDiv(n, blocking.unit_columns) <
             2 * num_workers &&
         blocking.unit_columns > columns) {
    blocking.unit_columns = EqualPart(n, blocking.unit_columns - columns, columns);
  }
  blocking.block_rows = EqualPart(blocking.unit_rows, 192, rows);
  blocking.group_columns =
      blocking.block_rows >= blocking.unit_rows ? 64 : blocking.unit_columns;
  blocking.group_columns = std::max(blocking.group_columns, columns);
  return blocking;
}

}  // namespace jax_ub
