// Validates GEMM problems.
#pragma once

#include "gemm/gemm.h"

namespace jax_ub {

// Checks that views and sizes are consistent. Throws std::invalid_argument with the
// actual and the expected values.
void CheckProblem(const GemmProblem& problem);

// Returns `problem` after checking it with CheckProblem.
GemmProblem Checked(GemmProblem problem);

}  // namespace jax_ub
