#define JAX_UB_KERNELS kernels_portable
#include "gemm/cpu/simd_portable.h"
// simd_portable.h must be included first: kernel_set.h uses its vector type.
#include "gemm/cpu/kernel_set.h"

namespace jax_ub {

constinit const KernelSet kPortableKernels =
    kernels_portable::KernelsOfF32<4, 2>("portable", 35, 256, false);

}  // namespace jax_ub
