// Selects the instruction set, and its kernels for the dtypes of a product.
#pragma once

#include "gemm/cpu/kernels.h"

namespace jax_ub {

// The kernels of an instruction set. `bf16` is used if bf16 represents all values of
// both operands exactly, as with bf16 and FP8. Otherwise `general` is used.
struct Isa {
  const KernelSet* general;
  const KernelSet* bf16;
  bool (*is_available)();
};

const Isa& IsaInUse();

// Prepares the calling thread for the kernels of `kernels`, and restores the thread's
// state at the end of the scope. Tile functions must be called within such a scope,
// because AMX needs a configuration of its tile registers.
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
