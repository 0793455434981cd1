#include "transport/cuda/multicast_kernels.h"

#include <algorithm>

namespace jax_ub {

// The image of multicast_kernels.cu.
extern const unsigned char kMulticastKernels[];

namespace {

// Others of the device's multiprocessors multiply meanwhile.
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
  CUlaunchConfig config = {};
  config.gridDimX = static_cast<unsigned>(std::min(needed, most));
  config.gridDimY = config.gridDimZ = 1;
  config.blockDimX = kMulticastThreads;
  config.blockDimY = config.blockDimZ = 1;
  config.hStream = stream;
  void* arguments[] = {const_cast<MulticastSumParams*>(&params)};
  Check(driver_, driver_.LaunchKernelEx(&config, sum_, arguments, nullptr),
        "cuLaunchKernelEx");
}

}  // namespace jax_ub
