#include "transport/cuda/multicast_kernels.h"

#include <algorithm>

#include "platform/cuda/launch.h"

namespace jax_ub {

// The compiled code of multicast_kernels.cu (a fatbin).
extern const unsigned char kMulticastKernels[];

namespace {

// Default number of thread blocks. It is small, so that most multiprocessors remain
// available to concurrent GEMMs.
constexpr int kDefaultBlocks = 32;

}  // namespace

MulticastKernels::MulticastKernels(const Driver& driver)
    : driver_(driver),
      library_(driver, kMulticastKernels),
      sum_(library_.Function(kMulticastSumKernel)) {}

void MulticastKernels::Sum(CUstream stream,
                           const MulticastSumParams& params,
                           int num_blocks) const {
  if (params.begin == params.end) return;
  const int64_t needed =
      (params.end - params.begin + kMulticastThreads - 1) / kMulticastThreads;
  const int64_t most = num_blocks > 0 ? num_blocks : kDefaultBlocks;
  LaunchKernel(driver_, sum_,
               LaunchConfig(stream, std::min(needed, most), kMulticastThreads), params);
}

}  // namespace jax_ub
