// The method "direct": one cooperative computation over the buffers of all ranks. It
// reads every operand and writes every result in place; nothing is sent.
#pragma once

#include <vector>

#include "engine/call.h"
#include "engine/cpu/work_list.h"
#include "engine/gemm_builders.h"

namespace jax_ub {

// Returns all the work of a call that CheckCall has accepted. Ops that sum GEMMs over
// ranks (matmul_reduce_scatter, matmul_all_reduce) require that all ranks are local.
WorkList PlanDirect(const CallAttributes& attributes,
                    const RankCalls& calls,
                    const Workers& workers);

// Returns the local GEMMs of all calls (LocalProducts) as one work list.
WorkList PlanProducts(const CallAttributes& attributes,
                      const std::vector<RankCall>& calls,
                      const Workers& workers);

// Returns only the communication of a bulk op or of a plain collective.
WorkList PlanCommunication(const CallAttributes& attributes, const RankCalls& calls);

}  // namespace jax_ub
