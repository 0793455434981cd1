#include "gemm/cuda/fp8_operands.h"

#include <algorithm>
#include <string>

#include "gemm/cuda/gemm_plan_cache.h"
#include "platform/error.h"

namespace jax_ub {

namespace {

bool HasBlockScales(const OperandView& operand) {
  return !operand.scales.empty() && operand.scale_dtype == DType::kE8M0;
}

// Returns whether a scale applies to a block of elements along k. Otherwise the block
// is along the other dimension, and the operand must be converted.
bool IsAlongK(const ScaleSegment& scales) { return scales.inner_block == kScaledBlock; }

bool IsContiguousAlongK(const ConstSegment& segment) {
  return segment.inner_stride == 1;
}

Fp8Copy::Kind KindOf(const OperandView& operand, bool transposes_fp8) {
  if (HasBlockScales(operand)) return Fp8Copy::Kind::kWithBlockScales;
  if (!operand.scales.empty()) return Fp8Copy::Kind::kWithRowScales;
  const bool is_read = !transposes_fp8 || !IsFp8(operand.dtype) ||
                       std::ranges::all_of(operand.segments, IsContiguousAlongK);
  return is_read ? Fp8Copy::Kind::kNone : Fp8Copy::Kind::kTransposed;
}

// Returns whether a factor varies between rows or between columns of any segment.
bool HasVector(const FactorView& factor) {
  return !std::ranges::all_of(factor.segments, &FactorSegment::is_one);
}

// Returns whether a factor varies between rows or between columns of every segment.
bool IsVector(const FactorView& factor) {
  return std::ranges::none_of(factor.segments, &FactorSegment::is_one);
}

bool IsAligned(const FactorSegment& segment) {
  return reinterpret_cast<uintptr_t>(segment.data) % kPlannedAlignmentBytes == 0;
}

// Throws UnsupportedError unless both operands have scales of blocks, and k consists of
// whole blocks.
void CheckBlockScales(const GemmProblem& problem) {
  if (!HasBlockScales(problem.a) || !HasBlockScales(problem.b) ||
      !problem.factors.empty()) {
    throw UnsupportedError(
        "MXFP8 on GPUs needs scales of blocks of both operands. Quantize both with "
        "ub.fp8.MXFP8BlockScaling");
  }
  for (const int64_t bound : problem.a.inner_bounds) {
    if (bound % kScaledBlock == 0) continue;
    throw UnsupportedError("MXFP8 on GPUs contracts multiples of " +
                           std::to_string(kScaledBlock) + " rows or features, and " +
                           std::to_string(bound) +
                           " is none. Pad them, or use a recipe with one scale per "
                           "tensor");
  }
}

ByteMatrix BytesOf(const BlockOperand& operand) {
  const uint64_t data = AddressOf(operand.data);
  return operand.lines_run_along_k ? ByteMatrix{data, operand.line_stride, 1}
                                   : ByteMatrix{data, 1, operand.line_stride};
}

}  // namespace

void CheckScales(const GemmProblem& problem) {
  if (HasBlockScales(problem.a) || HasBlockScales(problem.b)) {
    return CheckBlockScales(problem);
  }
  struct Side {
    bool is_converted;
    const FactorView* factor;  // nullptr: none
    int64_t size;

    bool has_vector() const {
      return is_converted || (factor != nullptr && HasVector(*factor));
    }
    bool is_vector() const {
      return is_converted || (factor != nullptr && IsVector(*factor));
    }
  };
  const bool has_factors = !problem.factors.empty();
  const Side sides[] = {{!problem.a.scales.empty(),
                         has_factors ? &problem.factors[0] : nullptr, problem.m},
                        {!problem.b.scales.empty(),
                         has_factors ? &problem.factors[1] : nullptr, problem.n}};
  if (std::ranges::none_of(sides, &Side::has_vector)) return;
  for (const Side& side : sides) {
    if (!side.is_vector() && side.size > 1) {
      throw UnsupportedError(
          "row scales on GPUs need a scale for each row of x and each column of w. "
          "Quantize both with ub.fp8.RowwiseScaling");
    }
    if (side.is_converted) continue;
    if (std::ranges::all_of(side.factor->segments, IsAligned)) continue;
    throw UnsupportedError(
        "row scales on GPUs need chunks of a multiple of 4 rows. Use a multiple of 16 "
        "rows per rank, or a recipe with one scale per tensor");
  }
}

Fp8Copy::Fp8Copy(const OperandView& operand, bool transposes_fp8, CUdeviceptr memory)
    : kind_(KindOf(operand, transposes_fp8)), memory_(memory) {
  const int64_t outer = operand.outer_bounds.back();
  const int64_t k = operand.inner_bounds.back();
  const bool is_read =
      kind_ == Kind::kNone || (kind_ == Kind::kWithBlockScales &&
                               std::ranges::all_of(operand.scales, IsAlongK));
  if (!is_read) values_bytes_ = BytesInWorkspace(outer * k);
  if (kind_ == Kind::kWithBlockScales) {
    scales_bytes_ = BytesInWorkspace(Fp8ScaleKernels::TileBytes(outer, k));
  }
  if (kind_ == Kind::kWithRowScales) {
    constexpr int64_t kBytes = SizeOf(DType::kF32);
    scales_bytes_ = BytesInWorkspace(outer * kBytes);
    largest_bytes_ = BytesInWorkspace(outer * kBytes * Fp8ScaleKernels::NumRowParts(k));
  }
}

BlockOperand Fp8Copy::Multiplied(const BlockOperand& original,
                                 int64_t outer,
                                 int64_t k) const {
  const bool has_blocks = kind_ == Kind::kWithBlockScales;
  const bool is_read = kind_ == Kind::kNone ||
                       (has_blocks && IsAlongK(original.scales)) ||
                       (kind_ == Kind::kTransposed && original.lines_run_along_k);
  if (is_read) return original;
  BlockOperand copy = original;
  copy.data = reinterpret_cast<const std::byte*>(memory_);
  if (!has_blocks) copy.lines_run_along_k = true;
  copy.line_stride = copy.lines_run_along_k ? k : outer;
  if (copy.batch_stride != 0) copy.batch_stride = outer * k;
  return copy;
}

void Fp8Operands::Enqueue(CUstream stream,
                          const Fp8Copy& copy,
                          const BlockOperand& operand,
                          DType dtype,
                          int64_t outer,
                          int64_t k,
                          int64_t batch) const {
  const BlockOperand to = copy.Multiplied(operand, outer, k);
  const ScaleSegment& scales = operand.scales;
  switch (copy.kind()) {
    case Fp8Copy::Kind::kNone:
      return;
    case Fp8Copy::Kind::kWithBlockScales:
      return scales_.StoreBlockScales(
          stream,
          {.scales = {AddressOf(scales.data), scales.outer_stride, scales.inner_stride},
           .outer = outer,
           .num_blocks = k / kScaledBlock,
           .to = copy.scales(),
           .values = BytesOf(operand),
           .converted = BytesOf(to),
           .dtype = dtype,
           .converts = !IsAlongK(scales)});
    case Fp8Copy::Kind::kWithRowScales:
      return scales_.ConvertRows(stream, {.values = BytesOf(operand),
                                          .scales = AddressOf(scales.data),
                                          .outer = outer,
                                          .k = k,
                                          .largest = copy.largest(),
                                          .to = copy.scales(),
                                          .converted = AddressOf(to.data),
                                          .dtype = dtype});
    case Fp8Copy::Kind::kTransposed:
      break;
  }
  if (to.data == operand.data) return;
  for (int64_t b = 0; b < (operand.batch_stride == 0 ? 1 : batch); ++b) {
    sums_.Transpose(stream, {.from = AddressOf(operand.data + b * operand.batch_stride),
                             .to = AddressOf(to.data + b * to.batch_stride),
                             .rows = k,
                             .columns = outer,
                             .from_stride = operand.line_stride,
                             .to_stride = to.line_stride});
  }
}

}  // namespace jax_ub
