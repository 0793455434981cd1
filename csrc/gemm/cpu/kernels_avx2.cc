#define JAX_UB_KERNELS kernels_avx2
#include "gemm/cpu/simd_avx2.h"
// The vectors come before what is written with them.
#include "gemm/cpu/kernel_set.h"

namespace jax_ub {

// 16 columns of B over 352 words are 22 of the 32 KiB of the first cache. Rows of A in
// place were 6 % slower than packed ones on Zen 3.
constinit const KernelSet kAvx2Kernels =
    kernels_avx2::KernelsOfF32<6, 2>("avx2", 100, 352, false);

}  // namespace jax_ub
