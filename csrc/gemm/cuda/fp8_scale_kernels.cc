#include "gemm/cuda/fp8_scale_kernels.h"

#include <stdexcept>
#include <string>

#include "platform/cuda/launch.h"

namespace jax_ub {

// The compiled code of fp8_scale_kernels.cu (a fatbin).
extern const unsigned char kFp8ScaleKernels[];

Fp8ScaleKernels::Fp8ScaleKernels(const Driver& driver)
    : driver_(driver),
      library_(driver, kFp8ScaleKernels),
      block_scales_(library_.Function(kBlockScalesKernel)),
      row_amax_(library_.Function(kRowAmaxKernel)),
      convert_rows_(library_.Function(kConvertRowsKernel)) {}

int64_t Fp8ScaleKernels::TileBytes(int64_t outer, int64_t k) {
  const int64_t num_blocks = k / kScaledBlock;
  return (outer + kScaleTileRows - 1) / kScaleTileRows *
         ((num_blocks + kScaleTileBlocks - 1) / kScaleTileBlocks) * kScaleTileBytes;
}

void Fp8ScaleKernels::StoreBlockScales(CUstream stream,
                                       const BlockScalesParams& params) const {
  const int64_t num_tiles =
      TileBytes(params.outer, params.num_blocks * kScaledBlock) / kScaleTileBytes;
  if (num_tiles == 0) return;
  LaunchKernel(driver_, block_scales_,
               LaunchConfig(stream, num_tiles, kBlockScalesThreads), params);
}

void Fp8ScaleKernels::ConvertRows(CUstream stream,
                                  const RowScalesParams& params) const {
  if (params.k % kRowVector != 0) {
    throw std::invalid_argument(
        "Fp8ScaleKernels: rows of " + std::to_string(params.k) +
        " elements cannot be converted: expected a multiple of " +
        std::to_string(kRowVector));
  }
  const int64_t num_threads = params.outer * NumRowParts(params.k);
  if (num_threads == 0) return;
  const CUlaunchConfig config =
      LaunchConfig(stream, (num_threads + kRowScalesThreads - 1) / kRowScalesThreads,
                   kRowScalesThreads);
  LaunchKernel(driver_, row_amax_, config, params);
  LaunchKernel(driver_, convert_rows_, config, params);
}

}  // namespace jax_ub
