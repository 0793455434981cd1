// The project's kernels on the host: flag_kernels.cu and sum_kernels.cu themselves,
// compiled as C++, with the few instructions that are PTX on a device in terms of
// std::atomic_ref. So what is tested without a GPU is the kernels' own text, and the
// thread sanitizer sees what a missing wait leaves unordered.
#pragma once

#include <cstddef>
#include <string_view>

namespace jax_ub {

struct EmulatedKernel {
  std::string_view name;
  size_t params_bytes = 0;  // of its one argument
  // Runs all threads on this one: a block's from the last to the first, which is what
  // SyncWarp of jax_ub_end means. Waits as long as the kernel waits. Throws
  // std::logic_error for an address that is less aligned than the launcher says.
  void (*run)(const void* params, unsigned num_blocks, unsigned num_threads) = nullptr;
};

// Addresses in parameters are those of this process. nullptr if there is none.
const EmulatedKernel* FindEmulatedKernel(std::string_view name);

}  // namespace jax_ub
