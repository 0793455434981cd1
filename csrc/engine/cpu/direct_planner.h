// The method "direct" executes a call as one computation over the buffers of all ranks.
// It reads every operand and writes every result in place, so no data is sent.
#pragma once

#include <vector>

#include "engine/call.h"
#include "engine/cpu/work_list.h"
#include "engine/gemm_builders.h"

namespace jax_ub {

// Returns all work units of a call that CheckCall has accepted. If the op sums GEMMs
// over ranks (matmul_reduce_scatter, matmul_all_reduce), all ranks must be in this
// process.
WorkList PlanDirect(const CallAttributes& attributes,
                    const RankCalls& calls,
                    const Workers& workers);

// Returns the work units of the GEMMs that read only the operands of one rank
// (LocalProducts), for all ranks in `calls`.
WorkList PlanProducts(const CallAttributes& attributes,
                      const std::vector<RankCall>& calls,
                      const Workers& workers);

// Returns the work units of the collective, without GEMMs. The op must be a plain
// collective or a bulk op, whose GEMMs do not depend on its collective.
WorkList PlanCommunication(const CallAttributes& attributes, const RankCalls& calls);

}  // namespace jax_ub
