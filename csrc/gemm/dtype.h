// The table of dtypes: element types of operands, results and scales.
//
// A new dtype needs an enumerator, a row, its number in XLA's and cuBLASLt's enums
// (ffi/decode.cc, gemm/cuda/cublaslt.cc: the compiler reports a missing case), and the
// functions that load and store it (gemm/cpu/simd_*.h, reduce/cuda/sum_kernels.cu).
#pragma once

// Only C headers are included, because files for different instruction sets include
// this header. The linker may merge inline functions of C++ headers across these files,
// and a CPU would then run instructions that it lacks.
#include <stdint.h>

namespace jax_ub {

enum class DType : uint8_t { kF32, kBF16, kF16, kE4M3, kE5M2, kE8M0 };

struct DTypeInfo {
  DType dtype;
  const char* name;        // in error messages and traces
  const char* numpy_name;  // in Python
  int64_t size_bytes;
  bool is_operand;     // whether GEMMs and sums read it; otherwise only scales have it
  bool is_result;      // whether GEMMs and sums store it
  bool exact_in_bf16;  // whether bf16 represents every value exactly
};

// The properties of each dtype: names, size in bytes and possible uses. Indexed by
// DType.
inline constexpr DTypeInfo kDTypes[] = {
    {DType::kF32, "f32", "float32", 4, true, true, false},
    {DType::kBF16, "bf16", "bfloat16", 2, true, true, true},
    {DType::kF16, "f16", "float16", 2, true, true, false},
    {DType::kE4M3, "e4m3", "float8_e4m3fn", 1, true, false, true},
    {DType::kE5M2, "e5m2", "float8_e5m2", 1, true, false, true},
    {DType::kE8M0, "e8m0", "float8_e8m0fnu", 1, false, false, true},
};
inline constexpr int kNumDTypes = sizeof(kDTypes) / sizeof(kDTypes[0]);

static_assert([] {
  for (int i = 0; i < kNumDTypes; ++i) {
    if (kDTypes[i].dtype != static_cast<DType>(i)) return false;
  }
  return true;
}());

constexpr const DTypeInfo& InfoOf(DType dtype) {
  return kDTypes[static_cast<int>(dtype)];
}

constexpr bool IsFp8(DType dtype) {
  return dtype == DType::kE4M3 || dtype == DType::kE5M2;
}

}  // namespace jax_ub
