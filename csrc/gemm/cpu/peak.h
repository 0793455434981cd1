// What products are held against: tiles whose panels stay in the first cache.
#pragma once

#include "gemm/cpu/kernels.h"
#include "gemm/scratch.h"

namespace jax_ub {

// How long this thread has had a core.
double ThreadCpuSeconds();

// Multiplies a panel of A with a panel of B on this thread, the same two again and again
// for that long: nothing is packed, nothing is read from behind the first cache. Returns
// operations per second that the thread had a core.
double MeasureTiles(const KernelSet& kernels, double duration_s, Scratch& scratch);

}  // namespace jax_ub
