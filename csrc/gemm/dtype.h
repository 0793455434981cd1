// Element types that GEMMs and reductions read and write.
#pragma once

#include <stdint.h>

namespace jax_ub {

enum class DType : uint8_t { kF32, kBF16, kF16 };

inline constexpr int kNumDTypes = 3;

}  // namespace jax_ub
