// Converts elements of f32, bf16 and f16 to f32 when they are loaded, and from f32 when
// they are stored.
#pragma once

#include "gemm/dtype.h"
#include "platform/cuda/instructions.cuh"

namespace jax_ub::gpu {
namespace {

__device__ float LoadElement(uint64_t data, int64_t index, DType dtype) {
  if (dtype == DType::kF32) return reinterpret_cast<const float*>(data)[index];
  const uint32_t bits = reinterpret_cast<const uint16_t*>(data)[index];
  return dtype == DType::kBF16 ? WidenBF16(bits).x : WidenF16(bits).x;
}

__device__ void StoreElement(uint64_t data, int64_t index, DType dtype, float value) {
  if (dtype == DType::kF32) {
    reinterpret_cast<float*>(data)[index] = value;
    return;
  }
  const uint32_t pair =
      dtype == DType::kBF16 ? NarrowBF16({value, 0}) : NarrowF16({value, 0});
  reinterpret_cast<uint16_t*>(data)[index] = static_cast<uint16_t>(pair);
}

// Converts the elements in 16 bytes to f32: four f32, or eight bf16 or f16.
template <DType kDType, int kCount>
__device__ void WidenUnit(const uint4& unit, float (&x)[kCount]) {
  static_assert(kCount == (kDType == DType::kF32 ? 4 : 8));
  const uint32_t words[4] = {unit.x, unit.y, unit.z, unit.w};
  for (int i = 0; i < 4; ++i) {
    if constexpr (kDType == DType::kF32) {
      memcpy(&x[i], &words[i], sizeof(float));
    } else {
      const float2 wide =
          kDType == DType::kBF16 ? WidenBF16(words[i]) : WidenF16(words[i]);
      x[2 * i] = wide.x;
      x[2 * i + 1] = wide.y;
    }
  }
}

}  // namespace
}  // namespace jax_ub::gpu
