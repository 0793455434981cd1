// The most that the threads of a thread pool reach together.
#pragma once

#include "engine/cpu/thread_pool.h"
#include "gemm/dtype.h"

namespace jax_ub {

// Operations a second of tiles that stay in the first cache (see gemm/cpu/peak.h), of two
// operands of that dtype, on all threads at once, measured for that long. Time in which
// other processes have the cores does not count; more threads than cores count as the
// cores. Throws std::invalid_argument unless 0 < duration_s <= 60.
double MeasurePeak(ThreadPool& pool, DType dtype, double duration_s);

}  // namespace jax_ub
