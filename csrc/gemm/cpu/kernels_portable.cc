#define JAX_UB_KERNELS kernels_portable
#include "gemm/cpu/simd_portable.h"
// kernel_set.h must be included after simd_portable.h, because it uses the vector type
// that simd_portable.h defines.
#include "gemm/cpu/kernel_set.h"

namespace jax_ub {

constinit const KernelSet kPortableKernels =
    kernels_portable::KernelsOfF32<4, 2>("portable", 35, 256, false);

}  // namespace jax_ub
