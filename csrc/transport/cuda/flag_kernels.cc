#include "transport/cuda/flag_kernels.h"

namespace jax_ub {

// The image of flag_kernels.cu.
extern const unsigned char kFlagKernels[];

namespace {

constexpr unsigned kWarp = 32;
constexpr unsigned kSpoilThreads = 256;
constexpr unsigned kSpoilBlocks = 32;

template <typename Params>
void Launch(const Driver& driver,
            CUfunction kernel,
            CUstream stream,
            unsigned blocks,
            unsigned threads,
            const Params& params) {
  CUlaunchConfig config = {};
  config.gridDimX = blocks;
  config.gridDimY = config.gridDimZ = 1;
  config.blockDimX = threads;
  config.blockDimY = config.blockDimZ = 1;
  config.hStream = stream;
  void* arguments[] = {const_cast<Params*>(&params)};
  Check(driver, driver.LaunchKernelEx(&config, kernel, arguments, nullptr),
        "cuLaunchKernelEx");
}

}  // namespace

FlagKernels::FlagKernels(const Driver& driver)
    : driver_(driver),
      library_(driver, kFlagKernels),
      signal_(library_.Function(kSignalKernel)),
      wait_(library_.Function(kWaitKernel)),
      end_(library_.Function(kEndKernel)),
      spoil_(library_.Function(kSpoilKernel)) {}

void FlagKernels::Signal(CUstream stream, const SignalParams& params) const {
  Launch(driver_, signal_, stream, 1, kWarp, params);
}

void FlagKernels::Wait(CUstream stream, const WaitParams& params) const {
  Launch(driver_, wait_, stream, 1, kWarp, params);
}

void FlagKernels::End(CUstream stream, const SignalParams& params) const {
  Launch(driver_, end_, stream, 1, kWarp, params);
}

void FlagKernels::Spoil(CUstream stream, const SpoilParams& params) const {
  if (params.num_results == 0) return;
  Launch(driver_, spoil_, stream, kSpoilBlocks, kSpoilThreads, params);
}

}  // namespace jax_ub
