// Validates GEMM problems.
#pragma once

#include "gemm/gemm.h"

namespace jax_ub {

// Throws std::invalid_argument if views and sizes of the problem do not match, with the
// actual and the expected values.
void CheckProblem(const GemmProblem& problem);

// Returns `problem` if CheckProblem accepts it.
GemmProblem Checked(GemmProblem problem);

}  // namespace jax_ub
