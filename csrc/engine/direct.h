// The method "direct": every operand is read and every result written where it lies, by
// one cooperative computation over the buffers of all ranks. Nothing is sent.
#pragma once

#include <vector>

#include "engine/call.h"
#include "engine/work.h"

namespace jax_ub {

// The whole work of a gang: calls[rank], already checked.
Work PlanDirect(const Attributes& attributes,
                const std::vector<RankCall>& calls,
                int num_workers);

// Only the products of a bulk op, or of a wgrad whose operands are gathered already.
Work PlanProducts(const Attributes& attributes,
                  const std::vector<RankCall>& calls,
                  int num_workers);

}  // namespace jax_ub
