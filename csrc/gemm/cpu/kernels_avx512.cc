#define JAX_UB_KERNELS kernels_avx512
#include "gemm/cpu/simd_avx512.h"
// simd_avx512.h must be included first: kernel_set.h uses its vector type.
#include "gemm/cpu/kernel_set.h"

namespace jax_ub {

constinit const KernelSet kAvx512Kernels =
    kernels_avx512::KernelsOfF32<6, 4>("avx512", 105, 512, true);

}  // namespace jax_ub
