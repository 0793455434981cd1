// GEMMs over segmented operands in device memory, computed by cuBLASLt.
//
// As on the CPU, products are summed in f32, addends are added to this sum, and the
// result is rounded once. Unlike on the CPU, subnormal f32 numbers keep their value.
//
// Row-major C [m, n] = A [m, k] B [k, n] is column-major C^T = B^T A^T. So cuBLASLt's A
// is this file's B, and its M is this file's N. Segments are merged into as few calls
// as their addresses allow (gemm_blocks.h). cuBLASLt computes the final result itself
// in the cases of the first two rows below. Else the f32 sum is stored in the
// workspace, and SumKernels adds the addends and rounds:
//
//   dtype of C   segments along k   addends (at most a bias and a matrix)   done by
//   f32          any number         f32                                     cuBLASLt
//   as A and B   one                dtype of C                              cuBLASLt
//   otherwise                                                               SumKernels
//
// FP8 operands are multiplied with results of any dtype. Their scales are in device
// memory: one for each operand, or one for each row and each column of the result, as
// factors of the problem; or one for each block of 32 elements. fp8_operands.h describes
// the copies of operands that cuBLASLt does not read, which are in the workspace.
//
// cuBLASLt has no algorithm for some products with addends, and requires a bias that is
// aligned to 16 bytes. In these cases SumKernels store the addends in the result, and
// cuBLASLt adds the product. If that would round twice, SumKernels add the addends to
// the f32 sum instead, as in the last row.
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
  // Whether FP8 operands that are not contiguous along k are transposed first.
  bool transposes_fp8 = true;
  // Index into the algorithms that cuBLASLt proposes, fastest first. An index past the
  // end selects the last algorithm.
  int algorithm = 0;
};

// Device memory that a product uses until it completes. 256-byte aligned. Each lane has
// its workspace, so products of different lanes do not share one.
struct GemmWorkspace {
  CUdeviceptr data = 0;
  int64_t size_bytes = 0;
};

// Size of the workspace for cuBLASLt, as NVIDIA recommends for Hopper and newer.
inline constexpr int64_t kLibraryWorkspaceBytes = int64_t{32} << 20;

// Computes GEMMs on one device, whose context is current in the constructor. Any thread
// may use the object while this context is current.
class CudaGemm {
 public:
  // Plans GEMMs with `library` for the device of the current context. All arguments
  // must outlive the object.
  CudaGemm(const CublasLt& library, const Driver& driver, const SumKernels& sums);
  ~CudaGemm();
  CudaGemm(const CudaGemm&) = delete;
  CudaGemm& operator=(const CudaGemm&) = delete;

  // Returns a workspace size, a multiple of 256, that is sufficient for all problems
  // with these shapes, strides and dtypes, independent of addresses. Needs no device.
  // Throws UnsupportedError if cuBLASLt cannot multiply by the scales of the operands.
  static int64_t WorkspaceBytes(const GemmProblem& problem, bool transposes_fp8 = true);

  // Creates the plans that Enqueue looks up: queries cuBLASLt's heuristics, and runs
  // each new plan once so that its kernels are loaded. Allocates device memory for this
  // run and waits for it, so it must not be called while the thread captures a stream.
  // Plans depend on addresses only through their alignment and through which segments
  // are adjacent.
  void Prepare(const GemmProblem& problem,
               const GemmOptions& options,
               const GemmWorkspace& workspace);

  // Enqueues the product. Allocates no device memory, does not wait, and can be
  // captured. Throws std::invalid_argument if views and sizes are inconsistent or the
  // workspace is too small, and UnsupportedError if cuBLASLt has no algorithm.
  void Enqueue(const GemmProblem& problem,
               const GemmOptions& options,
               const GemmWorkspace& workspace,
               CUstream stream);

  // Returns the number of algorithms for the problem (at least 1), which is the number
  // of useful values of GemmOptions::algorithm. Also does what Prepare does.
  int NumAlgorithms(const GemmProblem& problem,
                    const GemmOptions& options,
                    const GemmWorkspace& workspace);

 private:
  class State;
  const std::unique_ptr<State> state_;
};

}  // namespace jax_ub
