// Launches emulated kernels in the calling thread.
#pragma once

#include <cstdint>

#include "check.h"
#include "cuda/emulated_kernels.h"

namespace jax_ub {

template <typename Params>
void Launch(const char* name,
            const Params& params,
            unsigned num_blocks,
            unsigned num_threads) {
  const EmulatedKernel* kernel = FindEmulatedKernel(name);
  CHECK(kernel != nullptr);
  CHECK_EQ(kernel->params_bytes, sizeof(Params));
  kernel->run(&params, num_blocks, num_threads);
}

template <typename T>
uint64_t AddressOf(T* pointer) {
  return reinterpret_cast<uint64_t>(pointer);
}

}  // namespace jax_ub
