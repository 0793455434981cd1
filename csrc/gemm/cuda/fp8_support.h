// Tells which FP8 GEMMs cuBLASLt supports, by the compute capability of the device and
// the version of cuBLASLt.
#pragma once

#include <compare>
#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>

namespace jax_ub {

struct ComputeCapability {
  int major = 0;
  int minor = 0;

  auto operator<=>(const ComputeCapability&) const = default;
};

// cuBLASLt requires that all sizes of an FP8 GEMM are multiples of this.
inline constexpr int64_t kFp8Multiple = 16;

// Returns why a device cannot run GEMMs of FP8 operands, or "". `scaled_unit` is the
// part of an operand that has one scale: the "tensor", a "row" or column of the
// product, or a "block" of 32 elements along the contracted dimension. `version` is
// cuBLASLt's version, such as 130100, or 0 if it is unknown.
std::string WhyNoFp8(std::string_view scaled_unit,
                     const ComputeCapability& device,
                     size_t version);

// Returns whether FP8 operands must be contiguous along the contracted dimension (in
// cuBLASLt's terms, A is transposed and B is not).
bool NeedsContiguousFp8(const ComputeCapability& device);

}  // namespace jax_ub
