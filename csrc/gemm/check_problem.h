// Refuses problems whose views and sizes disagree.
#pragma once

#include "gemm/gemm.h"

namespace jax_ub {

// Throws std::invalid_argument that says what was found and expected.
void CheckProblem(const GemmProblem& problem);

// The problem itself, if it passes.
GemmProblem Checked(GemmProblem problem);

}  // namespace jax_ub
