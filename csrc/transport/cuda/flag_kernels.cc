#include "transport/cuda/flag_kernels.h"

#include "platform/cuda/launch.h"

namespace jax_ub {

// The compiled code of flag_kernels.cu (a fatbin).
extern const unsigned char kFlagKernels[];

namespace {

constexpr int kWarp = 32;

}  // namespace

FlagKernels::FlagKernels(const Driver& driver)
    : driver_(driver),
      library_(driver, kFlagKernels),
      signal_(library_.Function(kSignalKernel)),
      wait_(library_.Function(kWaitKernel)),
      end_(library_.Function(kEndKernel)),
      check_partition_(library_.Function(kCheckPartitionKernel)),
      fill_nan_(library_.Function(kFillNanKernel)) {}

void FlagKernels::Signal(CUstream stream, const SignalParams& params) const {
  LaunchKernel(driver_, signal_, LaunchConfig(stream, 1, kWarp), params);
}

void FlagKernels::Wait(CUstream stream, const WaitParams& params) const {
  LaunchKernel(driver_, wait_, LaunchConfig(stream, 1, kWarp), params);
}

void FlagKernels::End(CUstream stream, const EndParams& params) const {
  LaunchKernel(driver_, end_, LaunchConfig(stream, 1, kEndThreads), params);
}

void FlagKernels::CheckPartition(CUstream stream,
                                 const PartitionCheckParams& params) const {
  LaunchKernel(driver_, check_partition_, LaunchConfig(stream, 1, kWarp), params);
}

void FlagKernels::FillNan(CUstream stream, const NanFillParams& params) const {
  LaunchKernel(driver_, fill_nan_, LaunchConfig(stream, 1, kEndThreads), params);
}

}  // namespace jax_ub
