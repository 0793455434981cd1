#include "transport/cuda/all_reduce_kernel.h"

#include <algorithm>
#include <cstdint>

#include "platform/cuda/launch.h"

namespace jax_ub {

// The compiled code of all_reduce_kernel.cu (a fatbin).
extern const unsigned char kAllReduceKernels[];

namespace {

constexpr uint64_t kUnitBytes = 16;

}  // namespace

AllReduceKernel::AllReduceKernel(const Driver& driver)
    : driver_(driver),
      library_(driver, kAllReduceKernels),
      all_reduce_(library_.Function(kAllReduceKernel)) {}

int AllReduceKernel::NumBlocks(int64_t num_elements) {
  constexpr int64_t kPerBlock = kAllReduceThreads * kAllReduceVector;
  return static_cast<int>(std::clamp<int64_t>(
      (num_elements + kPerBlock - 1) / kPerBlock, 1, kMaxAllReduceBlocks));
}

void AllReduceKernel::Run(CUstream stream, AllReduceParams params) const {
  // Slots are aligned.
  params.is_aligned = params.partial % kUnitBytes == 0 ? 1 : 0;
  LaunchKernel(driver_, all_reduce_,
               LaunchConfig(stream, NumBlocks(params.num_elements), kAllReduceThreads),
               params);
}

}  // namespace jax_ub
