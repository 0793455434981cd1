// Measures the peak GEMM rate of one thread: runs the micro-kernel with operands that
// stay in the L1 cache.
#pragma once

#include "gemm/cpu/kernels.h"
#include "gemm/scratch.h"

namespace jax_ub {

// Returns the CPU time that the calling thread has used, in seconds.
double ThreadCpuSeconds();

// Multiplies the same two panels repeatedly for `duration_s` seconds, on the calling
// thread. The panels stay in the L1 cache, and nothing is packed. Returns
// floating-point operations per second of CPU time.
double MeasureTiles(const KernelSet& kernels, double duration_s, Scratch& scratch);

}  // namespace jax_ub
