#define JAX_UB_KERNELS kernels_avx2
#include "gemm/cpu/simd_avx2.h"
// The vectors come before what is written with them.
#include "gemm/cpu/kernel_set.h"

namespace jax_ub {

constinit const KernelSet kAvx2Kernels = kernels_avx2::KernelsOfF32<6, 2>("avx2");

}  // namespace jax_ub
