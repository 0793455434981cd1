// How cuBLASLt computes a product: its descriptions of the matrices, and the algorithms
// that its heuristics propose. Made once per key, of one device.
#pragma once

#include <cuda.h>

#include <compare>
#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "gemm/cuda/cublaslt.h"
#include "gemm/dtype.h"
#include "platform/cuda/driver.h"

namespace jax_ub {

// A matrix as cuBLASLt sees it, column-major: what is known of its place before its
// address is. `alignment_bytes` is a power of two, at most kPlannedAlignmentBytes.
struct PlannedMatrix {
  int64_t leading = 0;
  int64_t batch_stride = 0;
  int64_t alignment_bytes = 0;
  auto operator<=>(const PlannedMatrix&) const = default;
};

// XLA aligns parameters of programs to that (its own buffers to 128), and cuBLAS asks for
// no more where it uses tensor cores. A plan that asked for more would be another one in a
// next run, with other kernels maybe; and a graph that had captured the first could not be
// updated.
inline constexpr int64_t kPlannedAlignmentBytes = 16;
inline constexpr int64_t kWorkspaceAlignmentBytes = 256;

// D [m, n] = op(A) [m, k] op(B) [k, n] + C + bias [m], of each of the batch.
struct MatmulKey {
  DType operand_dtype = DType::kF32;
  DType result_dtype = DType::kF32;  // of C and the bias too
  int64_t m = 0;
  int64_t n = 0;
  int64_t k = 0;
  int64_t batch = 1;
  bool transpose_a = false;
  bool transpose_b = false;
  PlannedMatrix a;
  PlannedMatrix b;
  PlannedMatrix c;
  PlannedMatrix d;
  bool has_bias = false;
  PlannedMatrix bias;
  bool allow_tf32 = false;
  int sm_target = 0;
  int64_t workspace_bytes = 0;
  auto operator<=>(const MatmulKey&) const = default;
};

// "bf16[4096, 8192] x bf16[8192, 1024] to f32", as the caller sees it: row-major.
std::string Describe(const MatmulKey& key);

struct MatmulArguments {
  const void* a = nullptr;
  const void* b = nullptr;
  const void* c = nullptr;  // not read unless beta is another than 0
  void* d = nullptr;
  const void* bias = nullptr;
  float alpha = 1;
  float beta = 0;
  void* workspace = nullptr;  // of the key's size
};

class MatmulPlan {
 public:
  // Throws UnsupportedError where cuBLASLt has no algorithm.
  MatmulPlan(const CublasLt& library, lt::Handle handle, const MatmulKey& key);

  int num_algorithms() const { return static_cast<int>(algorithms_.size()); }

  // Runs it once, in memory of its own, and waits for that: a matmul may load kernels when
  // it is first enqueued, and loading may wait for all that the device has to do, also for
  // a kernel that waits for a peer. Nothing where it has been done; not while this thread
  // captures. `adds`: whether beta will be another than 0.
  void WarmUp(const Driver& driver, int algorithm, bool adds);

  // By any thread. `algorithm` beyond the last is the last.
  void Enqueue(const MatmulArguments& arguments, int algorithm, CUstream stream);

 private:
  template <typename Object>
  using Owned = std::unique_ptr<Object, lt::Status (*)(Object*)>;

  Owned<lt::LayoutObject> MakeLayout(DType dtype,
                                     int64_t rows,
                                     int64_t columns,
                                     const PlannedMatrix& matrix) const;
  void MakeDescription();
  void FindAlgorithms();
  int IndexOf(int algorithm) const;
  void Run(const MatmulArguments& arguments,
           int index,
           CUstream stream,
           int64_t workspace_bytes);
  int64_t LargestOperandBytes() const;
  int64_t ResultBytes() const;

  const CublasLt& library_;
  const lt::Handle handle_;
  const MatmulKey key_;
  const Owned<lt::LayoutObject> a_;
  const Owned<lt::LayoutObject> b_;
  const Owned<lt::LayoutObject> c_;
  const Owned<lt::LayoutObject> d_;
  std::vector<lt::Algorithm> algorithms_;
  std::vector<int64_t> workspace_bytes_;  // [algorithm]
  std::mutex warming_mutex_;              // held while one warms up
  std::set<std::pair<int, bool>> warm_;   // algorithm, adds; guarded by it
  std::mutex
      mutex_;  // the description holds the address of the bias, of one call at a time
  Owned<lt::MatmulDescObject> description_;
};

class GemmPlanCache {
 public:
  // In the context that is current. `library` must outlive it.
  explicit GemmPlanCache(const CublasLt& library);

  // By any thread, with the same context current. Plans live as long as the cache.
  MatmulPlan& Find(const MatmulKey& key);

 private:
  const CublasLt& library_;
  std::unique_ptr<lt::HandleObject, lt::Status (*)(lt::Handle)> handle_;
  std::mutex mutex_;
  std::map<MatmulKey, std::unique_ptr<MatmulPlan>> plans_;  // guarded by mutex_
};

}  // namespace jax_ub
