#define JAX_UB_KERNELS kernels_avx512
#include "gemm/cpu/simd_avx512.h"
// kernel_set.h must be included after simd_avx512.h, because it uses the vector type
// that simd_avx512.h defines.
#include "gemm/cpu/kernel_set.h"

namespace jax_ub {

constinit const KernelSet kAvx512Kernels =
    kernels_avx512::KernelsOfF32<6, 4>("avx512", 105, 512, true);

}  // namespace jax_ub
