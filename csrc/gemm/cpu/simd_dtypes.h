// Loads elements of any dtype as f32 vectors, and stores f32 vectors as elements of any
// dtype. Included after a simd header.
#pragma once

#include "gemm/cpu/kernels.h"

namespace jax_ub::JAX_UB_KERNELS {

template <DType kDType>
inline constexpr int64_t kElementBytes = kDTypes[static_cast<int>(kDType)].size_bytes;

inline int64_t BytesOf(DType dtype) {
  return kDTypes[static_cast<int>(dtype)].size_bytes;
}

// Calls function.operator()<dtype>() for every dtype.
template <int kIndex = 0, typename Function>
constexpr void ForEachDType(const Function& function) {
  function.template operator()<static_cast<DType>(kIndex)>();
  if constexpr (kIndex + 1 < kNumDTypes) ForEachDType<kIndex + 1>(function);
}

template <DType kDType>
inline Vec LoadAs(const void* p) {
  if constexpr (kDType == DType::kBF16) return LoadBF16(p);
  if constexpr (kDType == DType::kF16) return LoadF16(p);
  return Load(p);
}

inline Vec LoadAny(const void* p, DType dtype) {
  if (dtype == DType::kBF16) return LoadBF16(p);
  if (dtype == DType::kF16) return LoadF16(p);
  return Load(p);
}

template <DType kDType>
inline void StoreAs(void* p, Vec v) {
  if constexpr (kDType == DType::kF32) Store(p, v);
  if constexpr (kDType == DType::kBF16) StoreBF16(p, v);
  if constexpr (kDType == DType::kF16) StoreF16(p, v);
}

}  // namespace jax_ub::JAX_UB_KERNELS
