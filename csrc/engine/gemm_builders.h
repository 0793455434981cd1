// Builds the GEMMs of an op: their operands, results and addends, as segments of the
// tensors of one rank or of all ranks.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "engine/call.h"
#include "engine/communicated_tensors.h"
#include "engine/segments.h"
#include "gemm/gemm.h"
#include "reduce/reduce.h"

namespace jax_ub {

// The calls of a group: `all` has the calls whose operands are read, `local` those
// whose results are written. If all ranks are in this process, both have the calls of
// all ranks. Otherwise, each process writes only the results of its local ranks.
struct RankCalls {
  // Indexed by rank. The calls of ranks in other processes have only the operands that
  // are communicated.
  const std::vector<RankCall>& all;
  const std::vector<RankCall>& local;
  // local_ranks[i] is the rank of local[i], ascending. Null: `local` has all ranks.
  const std::vector<int>* local_ranks = nullptr;

  int64_t RankOf(size_t i) const {
    return local_ranks == nullptr ? static_cast<int64_t>(i) : (*local_ranks)[i];
  }
};

// Returns the GEMMs of method "direct", which read the operands of all ranks and write
// the results of the local ranks. If the op sums GEMMs over ranks
// (matmul_reduce_scatter, matmul_all_reduce), all ranks must be local.
std::vector<GemmProblem> DirectProducts(const CallAttributes& attributes,
                                        const RankCalls& calls);

// Returns the GEMMs that need no data of other ranks: a local matmul, dx or dw_i in an
// op whose collective is independent of them, or dw_i after its operand was gathered.
std::vector<GemmProblem> LocalProducts(const CallAttributes& attributes,
                                       const RankCall& call);

// Returns the GEMM `to` = scale * (sum of all products x_i w_i of the ranks of `calls`).
// Each rank has one or more operand pairs (x_i, w_i). `to` has shape [batch * rows, N].
GemmProblem PartialProduct(const CallAttributes& attributes,
                           const std::vector<RankCall>& calls,
                           ResultSegments to);

// Returns one GEMM per kernel w_i. It multiplies x, the concatenation of `slices` along
// the rows, by w_i and writes the product to the rows of result y_i that begin at
// `row`. Returns no GEMM if x has no rows. For batch element b and row r of x:
//
//   y_i[b, row + r] = scale * x[b, r] w_i + bias_i + residual_i[b, row + r]
std::vector<GemmProblem> GatherProducts(const CallAttributes& attributes,
                                        const RankCall& call,
                                        std::span<const RowSlice> slices,
                                        int64_t row);

// Returns the GEMM that computes rows [begin, end) of `partial`, this rank's sum of x_i
// w_i over its pairs i, or nothing if the range is empty.
std::vector<GemmProblem> PartialProducts(const CallAttributes& attributes,
                                         const RankCall& call,
                                         const Tensor& partial,
                                         int64_t begin,
                                         int64_t end);

// Appends rows of this rank's bias and residual to `parts`, the matrices that a
// reduction adds. The rows are those of batch element `b` from `row` on.
void AddBiasAndResidual(const CallAttributes& attributes,
                        const RankCall& call,
                        int64_t b,
                        int64_t row,
                        std::vector<ConstMatrix>& parts);

}  // namespace jax_ub
