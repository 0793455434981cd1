// Refuses problems whose views and sizes disagree.
#pragma once

#include "gemm/gemm.h"

namespace jax_ub {

// The problem itself, or std::invalid_argument that says what was found and expected.
GemmProblem CheckProblem(GemmProblem problem);

}  // namespace jax_ub
