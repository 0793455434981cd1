// Matrix products over segmented operands in device memory, by cuBLASLt.
//
// What the CPU's GEMM promises holds here too: products are summed in f32, addends are
// added to that sum, and the result is rounded once. Subnormal numbers keep their value.
//
// Row-major C [m, n] = A [m, k] B [k, n] is column-major C^T = B^T A^T: cuBLASLt's A is our
// B, its M our N. Segments become as few calls as their addresses allow (gemm_blocks.h).
// Where cuBLASLt can neither round nor add as asked, the f32 sum lies in the workspace and
// SumKernels finish it:
//
//   result   operand pieces along k   addends                               in the result
//   f32      any number               one bias, one matrix, both f32        yes
//   as A, B  one                      one bias, one matrix, both as result  yes
//   others                                                                  no
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
  int sm_target = 0;        // SMs that cuBLASLt shall plan for; 0: all of the device
  bool allow_tf32 = false;  // f32 operands may be rounded to TF32
  // Of those that cuBLASLt proposes, best first; where it proposes fewer, its last.
  int algorithm = 0;
};

// Device memory that a product may use until it is done: one lane's, 256-byte aligned.
struct GemmWorkspace {
  CUdeviceptr data = 0;
  int64_t size_bytes = 0;
};

// What cuBLASLt itself is given: its recommendation for Hopper and later.
inline constexpr int64_t kLibraryWorkspaceBytes = int64_t{32} << 20;

// Of one device: of the context that is current when it is made. May be used by any
// thread, with that context current.
class CudaGemm {
 public:
  // All three must outlive it.
  CudaGemm(const CublasLt& library, const Driver& driver, const SumKernels& sums);
  ~CudaGemm();
  CudaGemm(const CudaGemm&) = delete;
  CudaGemm& operator=(const CudaGemm&) = delete;

  // Enough for any problem of this shape, wherever its segments lie: a multiple of 256.
  // Needs no device.
  static int64_t WorkspaceBytes(const GemmProblem& problem);

  // Makes the plans that Enqueue will look up: asks cuBLASLt's heuristics, and runs each
  // new plan once so that its kernels are loaded. Needs memory for that, and waits; not
  // while this thread captures. Addresses matter only by their alignment and by how
  // segments adjoin.
  void Prepare(const GemmProblem& problem,
               const GemmOptions& options,
               const GemmWorkspace& workspace);

  // Enqueues the product; allocates no device memory, waits for nothing and can be
  // captured. Throws std::invalid_argument where views and sizes disagree or the
  // workspace is too small, UnsupportedError where cuBLASLt has no algorithm.
  void Enqueue(const GemmProblem& problem,
               const GemmOptions& options,
               const GemmWorkspace& workspace,
               CUstream stream);

  // How many values GemmOptions::algorithm has for a problem, at least 1. Prepares it.
  int NumAlgorithms(const GemmProblem& problem,
                    const GemmOptions& options,
                    const GemmWorkspace& workspace);

 private:
  class State;
  const std::unique_ptr<State> state_;
};

}  // namespace jax_ub
