// Measures the peak rate of a thread: the micro-kernel with operands in the L1 cache.
#pragma once

#include "gemm/cpu/kernels.h"
#include "gemm/scratch.h"

namespace jax_ub {

// Returns the CPU time of the calling thread in seconds.
double ThreadCpuSeconds();

// Multiplies the same panel of A with the same panel of B repeatedly for `duration_s`,
// on the calling thread. Packs nothing and reads only the L1 cache. Returns
// floating-point operations per second of CPU time.
double MeasureTiles(const KernelSet& kernels, double duration_s, Scratch& scratch);

}  // namespace jax_ub
