// Prepares FP8 operands for cuBLASLt. If cuBLASLt cannot read an operand or its scales
// in place, they are copied to the workspace:
//
//   operand                                      workspace
//   contiguous along k, or all layouts are read  nothing
//   contiguous along the other dimension         a transposed copy
//   scales of blocks along k                     the scales in tiles
//   scales of blocks along the other dimension   a converted copy, its scales in tiles
//   scales that change with k                    a converted copy, its scales of rows
//
// A converted copy has other values and scales, which represent the same numbers, as
// far as they are not too small (fp8_scale_kernels.cu).
#pragma once

#include <cuda.h>

#include <cstdint>

#include "gemm/cuda/fp8_scale_kernels.h"
#include "gemm/cuda/gemm_blocks.h"
#include "gemm/gemm.h"
#include "platform/cuda/driver.h"
#include "reduce/cuda/sum_kernels.h"

namespace jax_ub {

// Throws UnsupportedError if cuBLASLt cannot multiply by the scales of the FP8
// operands.
void CheckScales(const GemmProblem& problem);

// The memory for a copy of one FP8 operand and its scales, in the form that cuBLASLt
// reads. It is reused for each block of the result and each term (interval of k).
class Fp8Copy {
 public:
  enum class Kind : uint8_t { kNone, kTransposed, kWithBlockScales, kWithRowScales };

  Fp8Copy() = default;
  // `transposes_fp8` is GemmOptions::transposes_fp8. The copy is stored at `memory`.
  Fp8Copy(const OperandView& operand, bool transposes_fp8, CUdeviceptr memory);

  Kind kind() const { return kind_; }
  int64_t size_bytes() const { return values_bytes_ + scales_bytes_ + largest_bytes_; }
  // Returns the address of the copied scales: one per block, in the tiles that cuBLASLt
  // reads, or one per row.
  CUdeviceptr scales() const { return memory_ + values_bytes_; }
  // Returns the address of scratch memory for the kernels that convert rows. They
  // divide each row into parts, and write the largest absolute value of each part to
  // this memory.
  CUdeviceptr largest() const { return scales() + scales_bytes_; }
  // Returns the operand that cuBLASLt reads: the copy if values are copied, otherwise
  // `original`. A copy with block scales has the layout of the original. Other copies
  // are contiguous along k.
  BlockOperand Multiplied(const BlockOperand& original, int64_t outer, int64_t k) const;

 private:
  Kind kind_ = Kind::kNone;
  CUdeviceptr memory_ = 0;
  int64_t values_bytes_ = 0;
  int64_t scales_bytes_ = 0;
  int64_t largest_bytes_ = 0;
};

// Enqueues the kernels that copy FP8 operands and their scales to the workspace, in the
// form that cuBLASLt reads. Loads the kernels in the current CUDA context.
class Fp8Operands {
 public:
  // Keeps references to both arguments, which must outlive the object.
  Fp8Operands(const Driver& driver, const SumKernels& sums)
      : sums_(sums), scales_(driver) {}

  // Enqueues the kernels that copy an operand [outer, k] and its scales. Enqueues
  // nothing if cuBLASLt reads the operand in place.
  void Enqueue(CUstream stream,
               const Fp8Copy& copy,
               const BlockOperand& operand,
               DType dtype,
               int64_t outer,
               int64_t k,
               int64_t batch) const;

 private:
  const SumKernels& sums_;
  const Fp8ScaleKernels scales_;
};

}  // namespace jax_ub
