// Plans of cuBLASLt matmuls, cached per key and device. A plan holds the descriptors of
// the matrices and the algorithms that cuBLASLt's heuristics propose.
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

// Layout of a column-major matrix. Strides are in elements. `alignment_bytes` is a
// power of two, at most kPlannedAlignmentBytes.
struct PlannedMatrix {
  int64_t leading = 0;
  int64_t batch_stride = 0;
  int64_t alignment_bytes = 0;
  auto operator<=>(const PlannedMatrix&) const = default;
};

// kPlannedAlignmentBytes is the largest alignment of operands on which plans rely. XLA
// aligns parameters of a program to 16 bytes (and its own buffers to 128), and cuBLAS
// needs no more for tensor cores. If plans relied on a larger alignment, a plan might
// differ between runs, and XLA could not update a graph that was captured with other
// kernels. kWorkspaceAlignmentBytes is the alignment of arrays in a workspace.
inline constexpr int64_t kPlannedAlignmentBytes = 16;
inline constexpr int64_t kWorkspaceAlignmentBytes = 256;

// Returns how many bytes of a workspace an array takes, including the padding before
// the next array.
constexpr int64_t BytesInWorkspace(int64_t size_bytes) {
  return (size_bytes + kWorkspaceAlignmentBytes - 1) / kWorkspaceAlignmentBytes *
         kWorkspaceAlignmentBytes;
}

// The kind of scales that A and B have, aligned to kPlannedAlignmentBytes. kScalar: one
// f32 per operand. kOuterVector: one f32 per row of op(A) and column of op(B). kBlocks:
// one e8m0 number per block of 32 elements along k, in the layout of
// fp8_scale_params.h.
enum class Scales : uint8_t { kNone, kScalar, kOuterVector, kBlocks };

// The key of a plan for D [m, n] = op(A) [m, k] op(B) [k, n] + C + bias [m], for each
// matrix of a batch. Contains everything that affects the choice of an algorithm.
struct MatmulKey {
  DType a_dtype = DType::kF32;
  DType b_dtype = DType::kF32;
  DType result_dtype = DType::kF32;  // dtype of C, D and the bias
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
  bool has_bias = false;  // the bias must be aligned to kPlannedAlignmentBytes
  int64_t bias_batch_stride = 0;
  Scales scales = Scales::kNone;
  bool allow_tf32 = false;
  int sm_target = 0;
  int64_t workspace_bytes = 0;
  auto operator<=>(const MatmulKey&) const = default;
};

// Returns a text such as "bf16[4096, 8192] x bf16[8192, 1024] to f32, aligned to 16
// bytes", with shapes in row-major order.
std::string Describe(const MatmulKey& key);

struct MatmulArguments {
  const void* a = nullptr;
  const void* b = nullptr;
  const void* c = nullptr;  // read only if beta != 0
  void* d = nullptr;
  const void* bias = nullptr;
  const void* a_scales = nullptr;  // as MatmulKey::scales says
  const void* b_scales = nullptr;
  float alpha = 1;
  float beta = 0;
  void* workspace = nullptr;  // MatmulKey::workspace_bytes bytes
};

class MatmulPlan {
 public:
  MatmulPlan(const CublasLt& library, lt::Handle handle, const MatmulKey& key);

  // Returns the number of algorithms: 0 if cuBLASLt cannot compute the product. WarmUp
  // and Enqueue then throw UnsupportedError.
  int num_algorithms() const { return static_cast<int>(algorithms_.size()); }

  // Runs the plan once with temporary memory, and waits for it, so that Enqueue loads
  // no kernels. Loading may wait for all work of the device, including a kernel that
  // waits for a peer, which would be a deadlock. Later calls do nothing. Must not be
  // called during a stream capture. `adds` says whether beta will differ from zero.
  void WarmUp(const Driver& driver, int algorithm, bool adds);

  // Enqueues the matmul with the algorithm of index `algorithm`, or with the last
  // algorithm if the index is too large. Thread-safe.
  void Enqueue(const MatmulArguments& arguments, int algorithm, CUstream stream);

 private:
  template <typename Object>
  using Owned = std::unique_ptr<Object, lt::Status (*)(Object*)>;

  Owned<lt::LayoutObject> MakeLayout(DType dtype,
                                     int64_t rows,
                                     int64_t columns,
                                     const PlannedMatrix& matrix) const;
  void SetDescription(lt::DescAttribute attribute, auto value);
  void MakeDescription();
  void FindAlgorithms();
  // Returns `algorithm` or, if it is too large, the index of the last algorithm. Throws
  // UnsupportedError if there is no algorithm.
  int IndexOf(int algorithm) const;
  void Run(const MatmulArguments& arguments,
           int index,
           CUstream stream,
           int64_t workspace_bytes);
  int64_t LargestOperandBytes() const;

  const CublasLt& library_;
  const lt::Handle handle_;
  const MatmulKey key_;
  const Owned<lt::LayoutObject> a_;
  const Owned<lt::LayoutObject> b_;
  const Owned<lt::LayoutObject> c_;
  const Owned<lt::LayoutObject> d_;
  lt::Status heuristic_status_ = lt::Status::kSuccess;
  std::vector<lt::Algorithm> algorithms_;
  std::vector<int64_t> workspace_bytes_;  // [algorithm]
  std::mutex warming_mutex_;              // held during WarmUp
  std::set<std::pair<int, bool>> warm_;  // (algorithm, adds); guarded by warming_mutex_
  // Guards description_ if there is a bias or a scale. description_ then contains their
  // addresses, which differ between calls.
  std::mutex mutex_;
  Owned<lt::MatmulDescObject> description_;
};

class GemmPlanCache {
 public:
  // Creates a cuBLASLt handle in the current CUDA context. `library` must outlive the
  // cache.
  explicit GemmPlanCache(const CublasLt& library);

  // Returns the plan for `key`, which it creates at the first call. Plans live as long
  // as the cache. Thread-safe. The CUDA context in which the cache was constructed must
  // be current.
  MatmulPlan& Find(const MatmulKey& key);

 private:
  const CublasLt& library_;
  std::unique_ptr<lt::HandleObject, lt::Status (*)(lt::Handle)> handle_;
  std::mutex mutex_;
  std::map<MatmulKey, std::unique_ptr<MatmulPlan>> plans_;  // guarded by mutex_
};

}  // namespace jax_ub
