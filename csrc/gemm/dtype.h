// The table of dtypes: element types of operands and results of GEMMs and reductions.
//
// A new dtype needs an enumerator, a row, its number in XLA's and cuBLASLt's enums
// (ffi/decode.cc, gemm/cuda/cublaslt.cc: the compiler reports a missing case), and the
// functions that load and store it (gemm/cpu/simd_*.h, reduce/cuda/sum_kernels.cu).
#pragma once

// Only C headers are included here; see gemm/cpu/kernels.h.
#include <stdint.h>

namespace jax_ub {

enum class DType : uint8_t { kF32, kBF16, kF16 };

struct DTypeInfo {
  DType dtype;
  const char* name;        // in error messages and traces
  const char* numpy_name;  // in Python
  int64_t size_bytes;
};

// The table of dtypes, indexed by DType.
inline constexpr DTypeInfo kDTypes[] = {
    {DType::kF32, "f32", "float32", 4},
    {DType::kBF16, "bf16", "bfloat16", 2},
    {DType::kF16, "f16", "float16", 2},
};
inline constexpr int kNumDTypes = sizeof(kDTypes) / sizeof(kDTypes[0]);

static_assert([] {
  for (int i = 0; i < kNumDTypes; ++i) {
    if (kDTypes[i].dtype != static_cast<DType>(i)) return false;
  }
  return true;
}());

}  // namespace jax_ub
