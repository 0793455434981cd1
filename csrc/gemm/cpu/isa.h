// Selects the instruction set, and its kernels for the dtypes of a product.
#pragma once

#include "gemm/cpu/kernels.h"

namespace jax_ub {

// An instruction set: `general` are its kernels for any pair of dtypes, `bf16` those
// for two operands that are exact in bf16.
struct Isa {
  const KernelSet* general;
  const KernelSet* bf16;
  bool (*is_available)();
};

const Isa& IsaInUse();

// RAII: prepares the calling thread for these kernels, and restores its state at the
// end of the scope. Required around calls of tile functions (AMX configures its tile
// registers).
class ScopedKernelState {
 public:
  explicit ScopedKernelState(const KernelSet& kernels) : kernels_(kernels) {
    if (kernels_.begin != nullptr) kernels_.begin();
  }
  ~ScopedKernelState() {
    if (kernels_.end != nullptr) kernels_.end();
  }
  ScopedKernelState(const ScopedKernelState&) = delete;
  ScopedKernelState& operator=(const ScopedKernelState&) = delete;

 private:
  const KernelSet& kernels_;
};

inline const KernelSet& KernelsFor(const Isa& isa, DType a, DType b) {
  return InfoOf(a).exact_in_bf16 && InfoOf(b).exact_in_bf16 ? *isa.bf16 : *isa.general;
}

}  // namespace jax_ub
