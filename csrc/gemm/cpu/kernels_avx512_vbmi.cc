#define JAX_UB_KERNELS kernels_avx512_vbmi
#include "gemm/cpu/simd_avx512.h"
// simd_avx512.h must be included first: kernel_set.h uses its vector type.
#include "gemm/cpu/kernel_set.h"
#include "gemm/cpu/simd_fp8_vbmi.h"

namespace jax_ub {

constinit const KernelSet kAvx512VbmiKernels =
    kernels_avx512_vbmi::KernelsOfF32<6, 4, kernels_avx512_vbmi::WidenedByBytes>(
        "avx512_vbmi", 105, 512, true);

}  // namespace jax_ub
