// Launches kernels that take one argument, a struct of parameters.
#pragma once

#include <cuda.h>

#include <cstdint>

#include "platform/cuda/driver.h"

namespace jax_ub {

inline CUlaunchConfig LaunchConfig(CUstream stream, int64_t blocks, int threads) {
  CUlaunchConfig config = {};
  config.gridDimX = static_cast<unsigned>(blocks);
  config.gridDimY = config.gridDimZ = 1;
  config.blockDimX = static_cast<unsigned>(threads);
  config.blockDimY = config.blockDimZ = 1;
  config.hStream = stream;
  return config;
}

template <typename Params>
void LaunchKernel(const Driver& driver,
                  CUfunction kernel,
                  const CUlaunchConfig& config,
                  const Params& params) {
  void* arguments[] = {const_cast<Params*>(&params)};
  Check(driver, driver.LaunchKernelEx(&config, kernel, arguments, nullptr),
        "cuLaunchKernelEx");
}

}  // namespace jax_ub
