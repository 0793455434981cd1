#define JAX_UB_KERNELS kernels_avx2
#include "gemm/cpu/simd_avx2.h"
// simd_avx2.h must be included first: kernel_set.h uses its vector type.
#include "gemm/cpu/kernel_set.h"

namespace jax_ub {

// The AVX2 kernels. A panel of B with 16 columns and 352 words of K takes 22 of the 32
// KiB of the L1 cache. Reading rows of A in place was 6 % slower than packing them, on
// Zen 3.
constinit const KernelSet kAvx2Kernels =
    kernels_avx2::KernelsOfF32<6, 2>("avx2", 100, 352, false);

}  // namespace jax_ub
