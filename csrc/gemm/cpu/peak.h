// Measures the peak rate of a thread: the micro-kernel with operands in the L1 cache.
#pragma once

#include "gemm/cpu/kernels.h"
#include "gemm/scratch.h"

namespace jax_ub {

// Returns the CPU time that the calling thread has used, in seconds.
double ThreadCpuSeconds();

// Multiplies the same two panels repeatedly for `duration_s` seconds, on the calling
// thread. They stay in the L1 cache, and nothing is packed. Returns floating-point
// operations per second of CPU time.
double MeasureTiles(const KernelSet& kernels, double duration_s, Scratch& scratch);

}  // namespace jax_ub
