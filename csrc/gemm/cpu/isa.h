// The kernels in use, and those that a product of two dtypes needs.
#pragma once

#include "gemm/cpu/kernels.h"

namespace jax_ub {

// One instruction set: its kernels for any pair of dtypes, and for two bf16 operands.
struct Isa {
  const KernelSet* general;
  const KernelSet* bf16;
  bool (*is_available)();
};

const Isa& IsaInUse();

// While a thread calls tiles of these kernels.
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
  return a == DType::kBF16 && b == DType::kBF16 ? *isa.bf16 : *isa.general;
}

}  // namespace jax_ub
