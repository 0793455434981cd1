// Builds the GEMMs of an op. Their operands, results and addends are segments of the
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

// The calls of a group. The GEMMs read the operands of `all` and write the results of
// `local`. If all ranks are in this process, both members have the calls of all ranks.
// Otherwise, `local` has only the calls of this process's ranks.
struct RankCalls {
  // `all` is indexed by rank. The calls of ranks in other processes have only the
  // operands that are communicated.
  const std::vector<RankCall>& all;
  const std::vector<RankCall>& local;
  // local_ranks[i] is the rank of local[i], in ascending order. Null: `local` has all
  // ranks.
  const std::vector<int>* local_ranks = nullptr;

  int64_t RankOf(size_t i) const {
    return local_ranks == nullptr ? static_cast<int64_t>(i) : (*local_ranks)[i];
  }
};

// Returns the GEMMs of method "direct". They read the operands of all ranks and write
// the results of the local ranks. All ranks must be local if the op sums GEMMs over
// ranks (matmul_reduce_scatter, matmul_all_reduce).
std::vector<GemmProblem> DirectProducts(const CallAttributes& attributes,
                                        const RankCalls& calls);

// Returns the GEMMs that need no data of other ranks: those of a local op, and those of
// a bulk op, which are independent of its collective. Also returns the GEMMs of a
// weight gradient after its operand was gathered.
std::vector<GemmProblem> LocalProducts(const CallAttributes& attributes,
                                       const RankCall& call);

// Returns the GEMM `to` = scale * (sum of x_i w_i over the operand pairs i of all ranks
// in `calls`). `to` has shape [batch * rows, N].
GemmProblem PartialProduct(const CallAttributes& attributes,
                           const std::vector<RankCall>& calls,
                           ResultSegments to);

// Returns one GEMM per kernel w_i. The GEMM multiplies x, the concatenation of `slices`
// along the rows, by w_i. It writes the product to result y_i, from row `row` on.
// Returns no GEMM if x has no rows. For batch element b and row r of x:
//
//   y_i[b, row + r] = scale * x[b, r] w_i + bias_i + residual_i[b, row + r]
std::vector<GemmProblem> GatherProducts(const CallAttributes& attributes,
                                        const RankCall& call,
                                        std::span<const RowSlice> slices,
                                        int64_t row);

// Returns the GEMM that computes rows [begin, end) of `partial`, this rank's partial
// sum of x_i w_i over its operand pairs i. Returns no GEMM if the range is empty.
std::vector<GemmProblem> PartialProducts(const CallAttributes& attributes,
                                         const RankCall& call,
                                         const Tensor& partial,
                                         int64_t begin,
                                         int64_t end);

// Appends this rank's bias and residual to `parts`, the matrices that a reduction adds.
// The residual begins at row `row` of batch element `b`.
void AddBiasAndResidual(const CallAttributes& attributes,
                        const RankCall& call,
                        int64_t b,
                        int64_t row,
                        std::vector<ConstMatrix>& parts);

}  // namespace jax_ub
