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

// The ranks whose operands are read, and the ranks whose results are written. In one
// process both are all ranks. If a group spans processes, each process writes the
// results of its local ranks.
struct RankCalls {
  // Indexed by rank. For ranks of other processes only the communicated operands are
  // set.
  const std::vector<RankCall>& all;
  const std::vector<RankCall>& local;
  // The ranks that made the calls in `local`, ascending; null: all ranks.
  const std::vector<int>* local_ranks = nullptr;

  int64_t RankOf(size_t i) const {
    return local_ranks == nullptr ? static_cast<int64_t>(i) : (*local_ranks)[i];
  }
};

// Returns the GEMMs of the method direct, which read the operands of all ranks and write
// the results of the local ranks. Ops that sum GEMMs over ranks (matmul_reduce_scatter,
// matmul_all_reduce) require that all ranks are local.
std::vector<GemmProblem> DirectProducts(const CallAttributes& attributes,
                                        const RankCalls& calls);

// Returns the GEMMs of one rank that need no data of other ranks: a matmul, the dx or
// the dw_i of a bulk op, or the weight gradients whose operands have been gathered.
std::vector<GemmProblem> LocalProducts(const CallAttributes& attributes,
                                       const RankCall& call);

// Returns the GEMM to = scale * sum of x_i w_i over the pairs i and over the ranks of
// `calls`; `to` is [batch x rows, N].
GemmProblem PartialProduct(const CallAttributes& attributes,
                           const std::vector<RankCall>& calls,
                           ResultSegments to);

// Returns one GEMM per kernel i, or none if `x` has no rows:
//
//   y_i[b, row + r] = scale * x[b, r] w_i + bias_i + residual_i[b, row + r]
//
// Row r counts through all slices of `x`, concatenated along the rows.
std::vector<GemmProblem> GatherProducts(const CallAttributes& attributes,
                                        const RankCall& call,
                                        std::span<const RowSlice> x,
                                        int64_t row);

// Returns the GEMM that computes rows [begin, end) of this rank's partial sum over its
// pairs (x_i, w_i), or none if there are no rows.
std::vector<GemmProblem> PartialProducts(const CallAttributes& attributes,
                                         const RankCall& call,
                                         const Tensor& partial,
                                         int64_t begin,
                                         int64_t end);

// Appends this rank's bias and residual to `parts`, the addends of a sum of partial
// sums, for the rows of batch `b` that start at `row`.
void AddBiasAndResidual(const CallAttributes& attributes,
                        const RankCall& call,
                        int64_t b,
                        int64_t row,
                        std::vector<ConstMatrix>& parts);

}  // namespace jax_ub
