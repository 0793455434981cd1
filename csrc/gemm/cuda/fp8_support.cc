#include "gemm/cuda/fp8_support.h"

namespace jax_ub {

namespace {

constexpr ComputeCapability kAda = {8, 9};
constexpr ComputeCapability kHopper = {9, 0};

std::string TextOf(const ComputeCapability& device) {
  return std::to_string(device.major) + "." + std::to_string(device.minor);
}

// 120103 is 12.1.3.
std::string VersionText(size_t version) {
  return std::to_string(version / 10000) + "." + std::to_string(version / 100 % 100) +
         "." + std::to_string(version % 100);
}

bool MultipliesBlocks(const ComputeCapability& device) {
  return device.major == 10 || device.major == 11;
}

}  // namespace

std::string WhyNoFp8(std::string_view scaled_unit,
                     const ComputeCapability& device,
                     size_t version) {
  if (device < kAda) {
    return "FP8 needs a GPU of compute capability 8.9 or newer; this is " +
           TextOf(device);
  }
  constexpr std::string_view kInstead = ". Use a recipe with one scale per tensor";
  // The oldest version of cuBLASLt with which MXFP8 is multiplied. The heuristics of
  // older versions confuse MXFP8 with other FP8 products.
  constexpr size_t kLeastForBlocks = 120900;
  if (scaled_unit == "block") {
    const bool is_old = version != 0 && version < kLeastForBlocks;
    if (MultipliesBlocks(device) && !is_old) return "";
    return "MXFP8 needs a GPU of compute capability 10.x or 11.0 and cuBLASLt 12.9; "
           "this is " +
           TextOf(device) + (is_old ? " and " + VersionText(version) : "") +
           std::string(kInstead);
  }
  constexpr size_t kLeastForRows = 120900;
  const bool is_old = version != 0 && version < kLeastForRows;
  if (scaled_unit == "row" && (device != kHopper || is_old)) {
    return "row scales need a GPU of compute capability 9.0 and cuBLASLt 12.9; this "
           "is " +
           TextOf(device) + (is_old ? " and " + VersionText(version) : "") +
           std::string(kInstead);
  }
  constexpr size_t kLeastForAda = 120103;
  if (device == kAda && version != 0 && version < kLeastForAda) {
    return "FP8 on a GPU of compute capability 8.9 needs cuBLASLt " +
           VersionText(kLeastForAda) + "; this is " + VersionText(version);
  }
  return "";
}

bool NeedsContiguousFp8(const ComputeCapability& device) {
  return device.major < 10 || device.major == 12;
}

}  // namespace jax_ub
