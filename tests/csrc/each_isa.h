// Runs a test on every instruction set that this machine has.
#pragma once

#include <string_view>

#include "gemm/cpu/isa.h"
#include "gemm/gemm.h"

namespace jax_ub {

template <typename Function>
void ForEachIsa(const Function& function) {
  const std::string_view in_use = CurrentIsa();
  for (std::string_view isa : AvailableIsas()) {
    SetIsa(isa);
    function(IsaInUse());
  }
  SetIsa(in_use);
}

}  // namespace jax_ub
