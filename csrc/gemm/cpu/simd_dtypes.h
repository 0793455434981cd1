// Loads elements of any dtype as f32 vectors, and stores f32 vectors as elements of any
// dtype. This header must be included after a simd header, whose vector type it uses.
#pragma once

#include "gemm/cpu/kernels.h"

namespace jax_ub::JAX_UB_KERNELS {

template <DType kDType>
inline constexpr int64_t kElementBytes = InfoOf(kDType).size_bytes;

// Calls function.operator()<dtype>() for each dtype of operands.
template <int kIndex = 0, typename Function>
constexpr void ForEachDType(const Function& function) {
  constexpr DType kDType = static_cast<DType>(kIndex);
  if constexpr (InfoOf(kDType).is_operand) function.template operator()<kDType>();
  if constexpr (kIndex + 1 < kNumDTypes) ForEachDType<kIndex + 1>(function);
}

// Returns the size of an element in bytes. Does not call InfoOf at run time: this file
// is compiled for AVX, and the linker might use its copy of InfoOf in files that must
// run on CPUs without AVX.
inline int64_t BytesOf(DType dtype) {
  int64_t bytes = 0;
  ForEachDType([&]<DType kDType>() {
    if (kDType == dtype) bytes = kElementBytes<kDType>;
  });
  return bytes;
}

template <DType kDType>
inline Vec LoadAs(const void* p) {
  if constexpr (IsFp8(kDType)) return LoadFp8<kDType>(p);
  if constexpr (kDType == DType::kBF16) return LoadBF16(p);
  if constexpr (kDType == DType::kF16) return LoadF16(p);
  return Load(p);
}

inline Vec LoadAny(const void* p, DType dtype) {
  if (dtype == DType::kBF16) return LoadBF16(p);
  if (dtype == DType::kF16) return LoadF16(p);
  if (dtype == DType::kE4M3) return LoadFp8<DType::kE4M3>(p);
  if (dtype == DType::kE5M2) return LoadFp8<DType::kE5M2>(p);
  return Load(p);
}

template <DType kDType>
inline void StoreAs(void* p, Vec v) {
  if constexpr (kDType == DType::kF32) Store(p, v);
  if constexpr (kDType == DType::kBF16) StoreBF16(p, v);
  if constexpr (kDType == DType::kF16) StoreF16(p, v);
}

}  // namespace jax_ub::JAX_UB_KERNELS
