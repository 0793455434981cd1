// Element types of the operands and results of GEMMs and reductions.
#pragma once

#include <stdint.h>

namespace jax_ub {

enum class DType : uint8_t { kF32, kBF16, kF16 };

inline constexpr int kNumDTypes = 3;

}  // namespace jax_ub
