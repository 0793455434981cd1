// Makes calls of FP8 operands with scales, next to f32 calls with the same products.
#pragma once

#include <cmath>
#include <cstring>
#include <vector>

#include "call_maker.h"

namespace jax_ub_test {

enum class ScaleKind { kTensor, kRows, kBlocks };

// The calls of all ranks. `calls` have FP8 operands; `wide` have the dequantized
// operands, and the same results.
struct ScaledCalls {
  std::vector<RankCall> calls;
  std::vector<RankCall> wide;

  // Dequantizes gathered operands into the results of `wide`, for NumWrong.
  void Dequantize(const CallAttributes& at) const;
};

inline float ValueOf(std::byte code) {  // of the codes that MakeScaledCalls writes
  const auto bits = static_cast<uint8_t>(code);
  const float magnitude = (bits & 0x7f) == 0 ? 0 : (bits & 0x7f) == 0x38 ? 1 : 2;
  return bits & 0x80 ? -magnitude : magnitude;
}

inline float ScaleOf(
    const Tensor& scales, const Tensor& of, int64_t b, int64_t row, int64_t feature) {
  const int64_t batch = scales.batch == 1 ? 0 : b;
  const std::byte* at = scales.At(batch, row / (of.rows / scales.rows));
  feature /= of.features / scales.features;
  if (scales.dtype == DType::kE8M0) {
    return std::ldexp(1.0f, static_cast<int>(at[feature]) - 127);
  }
  return reinterpret_cast<const float*>(at)[feature];
}

// Adds an FP8 operand with values of `wide`, which are -2 to 2, and scales of the shape
// of `scales`, to a call. Multiplies `wide` by the scales.
inline void AddScaled(const Tensor& wide,
                      Tensor scales,
                      float tensor_scale,
                      Arrays& arrays,
                      RankCall& call) {
  Tensor values = arrays.Empty(wide.batch, wide.rows, wide.features);
  values.dtype = DType::kE4M3;
  // Random integers from -2 to 2 become exponents.
  const Tensor exponents = arrays.New(scales.batch, scales.rows, scales.features);
  const auto* exponent = reinterpret_cast<const float*>(exponents.data);
  scales.data = arrays.Empty(scales.batch, scales.rows, scales.features).data;
  for (int64_t i = 0; i < scales.num_elements(); ++i) {
    if (scales.dtype == DType::kE8M0) {
      scales.data[i] = static_cast<std::byte>(127 + exponent[i]);
    } else {
      reinterpret_cast<float*>(scales.data)[i] =
          tensor_scale != 0 ? tensor_scale : std::exp2(exponent[i]);
    }
  }
  constexpr uint8_t kCodes[] = {0xc0, 0xb8, 0, 0x38, 0x40};
  for (int64_t b = 0; b < wide.batch; ++b) {
    for (int64_t row = 0; row < wide.rows; ++row) {
      for (int64_t i = 0; i < wide.features; ++i) {
        float& x = At(wide, b, row, i);
        values.At(b, row)[i] = std::byte{kCodes[static_cast<int>(x) + 2]};
        x *= ScaleOf(scales, wide, b, row, i);
      }
    }
  }
  call.operands.push_back(values);
  call.scales.push_back(scales);
}

// Which operands stay f32, with scale 1. kFirst: the operand that a layer calls x or dy.
enum class WideOperands { kNone, kFirst, kOthers };

// `at` must have scales. With `is_crossed`, the scales of kernels change along the other
// dimension than usual: in a forward pass, along the outputs. If there are wide
// operands, `kind` must be kTensor.
inline ScaledCalls MakeScaledCalls(const CallAttributes& at,
                                   const Sizes& sizes,
                                   ScaleKind kind,
                                   bool is_crossed,
                                   Arrays& arrays,
                                   WideOperands wide_operands = WideOperands::kNone) {
  using jax_ub::GemmKind;
  const GemmKind gemm = jax_ub::InfoOf(at.op).gemm;
  const size_t num_factors = jax_ub::NumScales(at);
  const size_t first_kernel = gemm == GemmKind::kGatheredRows ? 1
                              : gemm == GemmKind::kWgrad      ? num_factors
                                                              : at.num_kernels;
  const size_t num_first = gemm == GemmKind::kWgrad ? 1 : first_kernel;
  ScaledCalls made;
  made.wide = MakeCalls(at, sizes, arrays);
  for (RankCall& wide : made.wide) {
    RankCall call = wide;
    call.operands.clear();
    for (size_t i = 0; i < num_factors; ++i) {
      const Tensor& of = wide.operands[i];
      if (wide_operands ==
          (i < num_first ? WideOperands::kFirst : WideOperands::kOthers)) {
        Tensor one = arrays.Empty(1, 1, 1);
        *reinterpret_cast<float*>(one.data) = 1;
        call.operands.push_back(of);
        call.scales.push_back(one);
        continue;
      }
      const bool is_kernel = i >= first_kernel;
      Tensor scales{DType::kF32, 1, 1, 1, nullptr};
      const bool is_along_rows = !is_kernel || at.rhs_transposed != is_crossed;
      if (kind == ScaleKind::kRows) {
        scales.batch = of.batch;
        (is_along_rows ? scales.rows = of.rows : scales.features = of.features);
      } else if (kind == ScaleKind::kBlocks) {
        scales = {DType::kE8M0, of.batch, of.rows, of.features, nullptr};
        (is_along_rows ? scales.features : scales.rows) /= 32;
      }
      // Each pair (x_i, w_i) and each gradient dy_i has a different scale per tensor.
      const bool has_one = kind == ScaleKind::kTensor;
      const auto pair = static_cast<int>(is_kernel ? i - first_kernel : i);
      const float tensor_scale =
          has_one ? std::ldexp(is_kernel ? 4.0f : 0.5f, pair) : 0;
      AddScaled(of, scales, tensor_scale, arrays, call);
    }
    call.operands.insert(call.operands.end(), wide.operands.begin() + num_factors,
                         wide.operands.end());
    if (gemm == GemmKind::kGatheredRows && at.return_gathered &&
        wide_operands != WideOperands::kFirst) {
      Tensor& gathered = call.results.back();
      gathered.dtype = DType::kE4M3;
      gathered.data =
          arrays.Empty(gathered.batch, gathered.rows, gathered.features).data;
      if (at.has_row_scales) {
        Tensor scales = call.scales[0];
        scales.rows = gathered.rows;
        scales.data = arrays.Empty(scales.batch, scales.rows, scales.features).data;
        call.results.push_back(scales);
      }
    }
    made.calls.push_back(call);
  }
  return made;
}

inline void ScaledCalls::Dequantize(const CallAttributes& at) const {
  const size_t n = at.num_kernels;
  if (at.op != Op::kAllGatherMatmul || !at.return_gathered) return;
  if (!jax_ub::IsFp8(calls[0].results[n].dtype)) return;
  for (size_t rank = 0; rank < calls.size(); ++rank) {
    const Tensor& values = calls[rank].results[n];
    const Tensor& scales =
        at.has_row_scales ? calls[rank].results[n + 1] : calls[rank].scales[0];
    for (int64_t b = 0; b < values.batch; ++b) {
      for (int64_t row = 0; row < values.rows; ++row) {
        for (int64_t i = 0; i < values.features; ++i) {
          At(wide[rank].results[n], b, row, i) =
              ValueOf(values.At(b, row)[i]) * ScaleOf(scales, values, b, row, i);
        }
      }
    }
  }
}

// Calls function(attributes, kind, is_crossed) for the FP8 forms of a call. Blocks need
// kernels of equal size.
template <typename Function>
void ForEachScaling(CallAttributes at, const Function& function) {
  at.has_scales = true;
  function(at, ScaleKind::kTensor, false);
  at.has_row_scales = true;
  for (const bool is_crossed : {false, true}) {
    function(at, ScaleKind::kRows, is_crossed);
    if (at.num_kernels == 1) function(at, ScaleKind::kBlocks, is_crossed);
  }
}

// Sizes of calls with blocks of 32 along any dimension of a kernel.
constexpr Sizes kBlockSizes = {2, 5, 64, 32};

}  // namespace jax_ub_test

namespace jax_ub {

using jax_ub_test::ForEachScaling;
using jax_ub_test::kBlockSizes;
using jax_ub_test::MakeScaledCalls;
using jax_ub_test::ScaleKind;
using jax_ub_test::WideOperands;

}  // namespace jax_ub
