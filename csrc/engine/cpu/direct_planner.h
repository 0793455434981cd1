// The method "direct": one cooperative computation over the buffers of all ranks. It
// reads every operand and writes every result in place; nothing is sent.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "engine/call.h"
#include "engine/cpu/work_list.h"
#include "engine/segments.h"

namespace jax_ub {

// The ranks whose operands are read, and the ranks whose results are written. In one
// process both are all ranks. If a group spans processes, each process writes the
// results of its local ranks.
struct RankCalls {
  // [rank]. For ranks of other processes only the communicated operands are set.
  const std::vector<RankCall>& all;
  const std::vector<RankCall>& local;
  // Ranks of `own`, ascending; null: all ranks.
  const std::vector<int>* local_ranks = nullptr;

  int64_t RankOf(size_t i) const {
    return local_ranks == nullptr ? static_cast<int64_t>(i) : (*local_ranks)[i];
  }
};

// Returns all the work of a call that CheckCall has accepted. Ops that sum GEMMs over
// ranks (matmul_reduce_scatter, matmul_all_reduce) require that all ranks are local.
WorkList PlanDirect(const CallAttributes& attributes,
                    const RankCalls& calls,
                    const Workers& workers);

// Returns the GEMMs of one rank that need no data of other ranks: a matmul, the dx or
// the dw_i of a bulk op, or the weight gradients whose operands have been gathered.
std::vector<GemmProblem> LocalProducts(const CallAttributes& attributes,
                                       const RankCall& call);

// Returns the LocalProducts of all calls as one work list.
WorkList PlanProducts(const CallAttributes& attributes,
                      const std::vector<RankCall>& calls,
                      const Workers& workers);

// Returns only the communication of a bulk op or of a plain collective.
WorkList PlanCommunication(const CallAttributes& attributes, const RankCalls& calls);

// Returns the GEMM to = scale * sum of x_i w_i over the pairs i and over the ranks of
// `calls`; `to` is [batch x rows, N].
GemmProblem PartialProduct(const CallAttributes& attributes,
                           const std::vector<RankCall>& calls,
                           ResultSegments to);

}  // namespace jax_ub
