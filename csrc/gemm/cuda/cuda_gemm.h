// GEMMs over segmented operands in device memory, computed by cuBLASLt.
//
// As on the CPU, products are summed in f32, addends are added to this sum, and the
// result is rounded once. Unlike on the CPU, subnormal f32 numbers keep their value.
//
// Row-major C [m, n] = A [m, k] B [k, n] is column-major C^T = B^T A^T, so cuBLASLt's A
// is this file's B, and its M is this file's N. Segments are merged into as few calls
// as their addresses allow (gemm_blocks.h).
//
// The scales of FP8 operands are in device memory: one per operand, or one per row and
// per column of the result (the factors of the problem), or one per block of 32
// elements. fp8_operands.h describes the copies of operands that cuBLASLt cannot read.
#pragma once

#include <cuda.h>

#include <cstdint>
#include <memory>

#include "gemm/cuda/cublaslt.h"
#include "gemm/gemm.h"
#include "platform/cuda/driver.h"
#include "reduce/cuda/sum_kernels.h"

namespace jax_ub {

struct GemmOptions {
  int sm_target = 0;        // number of SMs that cuBLASLt plans for; 0: all SMs
  bool allow_tf32 = false;  // whether f32 operands may be rounded to TF32
  // Whether FP8 operands are transposed first if they are not contiguous along k, which
  // some GPUs require (NeedsContiguousFp8).
  bool transposes_fp8 = true;
  // Index into the algorithms that cuBLASLt proposes, fastest first. If it is too
  // large, the last algorithm is used.
  int algorithm = 0;
};

// Device memory that a product uses until it completes, aligned to 256 bytes. Products
// on different lanes (streams) must not share a workspace.
struct GemmWorkspace {
  CUdeviceptr data = 0;
  int64_t size_bytes = 0;
};

// Size in bytes of cuBLASLt's own workspace, as NVIDIA recommends it for Hopper and
// newer.
inline constexpr int64_t kLibraryWorkspaceBytes = int64_t{32} << 20;

// Computes GEMMs on the device of the context that is current at construction. May be
// used by any thread that has the same context current.
//
// If possible, cuBLASLt adds the addends and stores the final result. Otherwise it
// stores an f32 sum in the workspace, and SumKernels add the addends and round:
//
//   dtype of C   segments along k   addends (at most a bias and a matrix)   done by
//   f32          any number         f32                                     cuBLASLt
//   as A and B   one                dtype of C                              cuBLASLt
//   otherwise                                                               SumKernels
//
// An FP8 product may have a result of any dtype. If cuBLASLt has no algorithm for a
// product with addends, or the bias is not aligned to 16 bytes, SumKernels first store
// the addends in the result, and cuBLASLt adds the product. If this would round twice,
// the last row of the table applies.
class CudaGemm {
 public:
  // Keeps references to all arguments, which must outlive the object.
  CudaGemm(const CublasLt& library, const Driver& driver, const SumKernels& sums);
  ~CudaGemm();
  CudaGemm(const CudaGemm&) = delete;
  CudaGemm& operator=(const CudaGemm&) = delete;

  // Returns a workspace size that is sufficient for all problems with these shapes,
  // strides and dtypes, at any addresses. The size is a multiple of 256. Needs no
  // device. Throws UnsupportedError if cuBLASLt cannot multiply by the scales of the
  // operands.
  static int64_t WorkspaceBytes(const GemmProblem& problem, bool transposes_fp8 = true);

  // Creates the plans that Enqueue needs: queries cuBLASLt's heuristics, and runs each
  // new plan once, so that its kernels are loaded. Allocates device memory for these
  // runs and waits for the device, so it must not be called during a stream capture.
  // Plans depend on addresses only by their alignment and by which segments are
  // adjacent. Returns the number of algorithms for the problem, at least 1:
  // GemmOptions::algorithm may have any smaller value.
  int Prepare(const GemmProblem& problem,
              const GemmOptions& options,
              const GemmWorkspace& workspace);

  // Enqueues the product. Allocates no device memory, does not wait, and can be
  // captured. Throws std::invalid_argument if views and sizes do not match or the
  // workspace is too small, and UnsupportedError if cuBLASLt has no algorithm.
  void Enqueue(const GemmProblem& problem,
               const GemmOptions& options,
               const GemmWorkspace& workspace,
               CUstream stream);

 private:
  class State;
  const std::unique_ptr<State> state_;
};

}  // namespace jax_ub
