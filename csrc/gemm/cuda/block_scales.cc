#include "gemm/cuda/block_scales.h"

#include "platform/cuda/launch.h"

namespace jax_ub {

// The fatbin of block_scales.cu.
extern const unsigned char kBlockScales[];

BlockScales::BlockScales(const Driver& driver)
    : driver_(driver),
      library_(driver, kBlockScales),
      kernel_(library_.Function(kBlockScalesKernel)) {}

int64_t BlockScales::SizeBytes(int64_t outer, int64_t k) {
  const int64_t num_blocks = k / kScaledBlock;
  return (outer + kScaleTileRows - 1) / kScaleTileRows *
         ((num_blocks + kScaleTileBlocks - 1) / kScaleTileBlocks) * kScaleTileBytes;
}

void BlockScales::Enqueue(CUstream stream, const BlockScalesParams& params) const {
  const int64_t num_tiles =
      SizeBytes(params.outer, params.num_blocks * kScaledBlock) / kScaleTileBytes;
  if (num_tiles == 0) return;
  LaunchKernel(driver_, kernel_, LaunchConfig(stream, num_tiles, kBlockScalesThreads),
               params);
}

}  // namespace jax_ub
