// The method "direct": every operand is read and every result written where it lies, by
// one cooperative computation over the buffers of all ranks. Nothing is sent.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "engine/call.h"
#include "engine/cpu/work_list.h"
#include "engine/segments.h"

namespace jax_ub {

// Whose operands are read, and whose results are written. In one process that is all
// ranks; where a group spans processes, each writes the results of its own.
struct RankCalls {
  // [rank]; of ranks elsewhere, only the operands that are communicated.
  const std::vector<RankCall>& all;
  const std::vector<RankCall>& own;
  const std::vector<int>* own_ranks = nullptr;  // ascending; null: all

  int64_t RankOf(size_t i) const {
    return own_ranks == nullptr ? static_cast<int64_t>(i) : (*own_ranks)[i];
  }
};

// The whole work of a call, already checked. Products that are summed over ranks
// (matmul_reduce_scatter, matmul_all_reduce) only where all ranks are own ones.
WorkList PlanDirect(const CallAttributes& attributes,
                    const RankCalls& calls,
                    const Workers& workers);

// What a rank multiplies for itself: a matmul, the dx or the dw_i of a bulk op, or those of
// a wgrad whose operands are gathered already.
std::vector<GemmProblem> LocalProducts(const CallAttributes& attributes,
                                       const RankCall& call);

// These of all the calls.
WorkList PlanProducts(const CallAttributes& attributes,
                      const std::vector<RankCall>& calls,
                      const Workers& workers);

// Only what a bulk op communicates, or a collective.
WorkList PlanCommunication(const CallAttributes& attributes, const RankCalls& calls);

// scale * sum of x w over the pairs and over these ranks, into `to` [batch x rows, N].
GemmProblem PartialProduct(const CallAttributes& attributes,
                           const std::vector<RankCall>& calls,
                           ResultSegments to);

}  // namespace jax_ub
