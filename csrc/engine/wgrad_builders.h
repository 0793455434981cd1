// Builds the GEMMs of weight gradients, dw_i = x^T dy_i; see gemm_builders.h.
#pragma once

#include "engine/gemm_builders.h"

namespace jax_ub {

// Each of these reads one operand (x or dy_i) from all ranks, and writes dw_i of the
// local ranks.
GemmProblem WgradGatherX(const CallAttributes& attributes,
                         const RankCalls& calls,
                         int i);
GemmProblem WgradGatherDy(const CallAttributes& attributes,
                          const RankCalls& calls,
                          int i);
// Communicates nothing.
GemmProblem Wgrad(const CallAttributes& attributes, const RankCall& call, int i);

}  // namespace jax_ub
