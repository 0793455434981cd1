// Measures the peak arithmetic throughput of a thread pool.
#pragma once

#include "engine/cpu/thread_pool.h"
#include "gemm/dtype.h"

namespace jax_ub {

// Returns the throughput, in operations per second, of GEMMs whose tiles stay in the L1
// cache (see gemm/cpu/peak.h). All threads compute GEMMs with two operands of `dtype`
// for `duration_s`. Time that the cores spend on other processes is not counted. If
// there are more threads than cores, the result is the throughput of the cores. Throws
// std::invalid_argument unless 0 < duration_s <= 60.
double MeasurePeak(ThreadPool& pool, DType dtype, double duration_s);

}  // namespace jax_ub
