// The subset of cuBLASLt's C interface that the GEMMs use. The types and functions are
// declared here. The functions are looked up at run time in the libcublasLt.so that JAX
// has loaded, so neither building nor loading jax_ub requires the library.
//
// All declarations are identical in cuBLASLt 12 and 13. The opaque objects behind the
// pointers are not (a matrix layout has 64 bytes in version 12 and 112 bytes in version
// 13), so only the library creates and destroys them. Matrices are column-major, as in
// BLAS.
#pragma once

#include <cuda.h>

#include <cstddef>
#include <cstdint>
#include <functional>
#include <span>
#include <string>

#include "gemm/dtype.h"

namespace jax_ub {

namespace lt {

using Handle = struct HandleObject*;          // cublasLtHandle_t
using MatmulDesc = struct MatmulDescObject*;  // cublasLtMatmulDesc_t
using Layout = struct LayoutObject*;          // cublasLtMatrixLayout_t
using Preference = struct PreferenceObject*;  // cublasLtMatmulPreference_t

enum class Status : int32_t {
  kSuccess = 0,
  kNotInitialized = 1,
  kAllocFailed = 3,
  kInvalidValue = 7,
  kArchMismatch = 8,
  kExecutionFailed = 13,
  kInternalError = 14,
  kNotSupported = 15,
};

enum class DataType : int32_t {  // cudaDataType
  kF32 = 0,
  kF16 = 2,
  kBF16 = 14,
  kE4M3 = 28,
  kE5M2 = 29,
};
enum class ComputeType : int32_t { k32F = 68, k32FFastTF32 = 77 };
enum class Operation : int32_t { kN = 0, kT = 1 };
// The part of an operand that one scale multiplies. kScalar: the whole matrix, by an
// f32. kVec32: 32 elements along K, by an e8m0 number (fp8_scale_params.h describes
// their layout). kOuterVector: a row of op(A) or a column of op(B), by an f32.
enum class ScaleMode : int32_t { kScalar = 0, kVec32 = 2, kOuterVector = 3 };
enum class Epilogue : uint32_t { kDefault = 1, kBias = 4 };

// Where an algorithm that splits K stores its partial sums. The values are bits of a
// mask of allowed places.
enum class ReductionScheme : uint32_t {
  kNone = 0,         // no split-K
  kInPlace = 1,      // in the result, in the result's dtype
  kComputeType = 2,  // in the workspace, in f32
  kOutputType = 4,   // in the workspace, in the result's dtype
  kAll = 7,
};

// Attributes of a matmul descriptor. Comments state the types of their values.
enum class DescAttribute : int32_t {
  kTransA = 3,            // int32_t, an Operation
  kTransB = 4,            // int32_t, an Operation
  kEpilogue = 7,          // uint32_t
  kBiasPointer = 8,       // const void*; heuristics derive the alignment from the value
  kBiasBatchStride = 10,  // int64_t, in elements
  kSmCountTarget = 15,    // int32_t; 0: all SMs of the device
  kAScalePointer = 17,    // const void*, scales of A in device memory; null: 1
  kBScalePointer = 18,    // const void*
  kBiasDataType = 26,     // int32_t, a DataType; default: the type of D
  kAScaleMode = 31,       // int32_t, a ScaleMode; since cuBLASLt 12.8
  kBScaleMode = 32,       // int32_t
};
enum class LayoutAttribute : int32_t {
  kBatchCount = 5,          // int32_t
  kStridedBatchOffset = 6,  // int64_t, in elements
};
enum class PreferenceAttribute : int32_t {
  kMaxWorkspaceBytes = 1,    // uint64_t
  kReductionSchemeMask = 3,  // uint32_t
  kMinAlignmentA = 5,        // uint32_t, in bytes; default: 256
  kMinAlignmentB = 6,
  kMinAlignmentC = 7,
  kMinAlignmentD = 8,
};

struct Algorithm {
  uint64_t words[8];
};

struct HeuristicResult {
  Algorithm algorithm;
  size_t workspace_bytes;
  Status state;  // the other members are valid only if this is kSuccess
  float waves;
  int32_t reserved[4];
};
static_assert(sizeof(Algorithm) == 64 && sizeof(HeuristicResult) == 96);

}  // namespace lt

// The functions of a loaded cuBLASLt library. Members are named like the functions,
// without the prefix "cublasLt".
struct CublasLt {
  std::string path;    // path of the loaded file, for reports
  size_t version = 0;  // 130100 is 13.1.0

  size_t (*GetVersion)() = nullptr;
  const char* (*GetStatusName)(lt::Status) = nullptr;
  lt::Status (*Create)(lt::Handle*) = nullptr;
  lt::Status (*Destroy)(lt::Handle) = nullptr;
  lt::Status (*MatmulDescCreate)(lt::MatmulDesc*,
                                 lt::ComputeType,
                                 lt::DataType scale) = nullptr;
  lt::Status (*MatmulDescDestroy)(lt::MatmulDesc) = nullptr;
  lt::Status (*MatmulDescSetAttribute)(lt::MatmulDesc,
                                       lt::DescAttribute,
                                       const void* value,
                                       size_t size_bytes) = nullptr;
  lt::Status (*MatrixLayoutCreate)(lt::Layout*,
                                   lt::DataType,
                                   uint64_t rows,
                                   uint64_t columns,
                                   int64_t leading_dimension) = nullptr;
  lt::Status (*MatrixLayoutDestroy)(lt::Layout) = nullptr;
  lt::Status (*MatrixLayoutSetAttribute)(lt::Layout,
                                         lt::LayoutAttribute,
                                         const void* value,
                                         size_t size_bytes) = nullptr;
  lt::Status (*MatmulPreferenceCreate)(lt::Preference*) = nullptr;
  lt::Status (*MatmulPreferenceDestroy)(lt::Preference) = nullptr;
  lt::Status (*MatmulPreferenceSetAttribute)(lt::Preference,
                                             lt::PreferenceAttribute,
                                             const void* value,
                                             size_t size_bytes) = nullptr;
  // Returns algorithms by expected speed, fastest first. If there is none, returns
  // kNotSupported, or kSuccess with *num_found == 0.
  lt::Status (*MatmulAlgoGetHeuristic)(lt::Handle,
                                       lt::MatmulDesc,
                                       lt::Layout a,
                                       lt::Layout b,
                                       lt::Layout c,
                                       lt::Layout d,
                                       lt::Preference,
                                       int num_requested,
                                       lt::HeuristicResult* results,
                                       int* num_found) = nullptr;
  // Computes D = epilogue(alpha * op(A) * op(B) + beta * C). alpha and beta are f32 on
  // the host, and are read before the function returns. C may be D if both have the
  // same layout.
  lt::Status (*Matmul)(lt::Handle,
                       lt::MatmulDesc,
                       const void* alpha,
                       const void* a,
                       lt::Layout a_layout,
                       const void* b,
                       lt::Layout b_layout,
                       const void* beta,
                       const void* c,
                       lt::Layout c_layout,
                       void* d,
                       lt::Layout d_layout,
                       const lt::Algorithm*,
                       void* workspace,
                       size_t workspace_bytes,
                       CUstream) = nullptr;
};

// Returns the cudaDataType of matrices of `dtype`. Throws std::invalid_argument for
// e8m0, which only scales have.
lt::DataType DataTypeOf(DType dtype);

// Looks up the functions of cuBLASLt with `find`, which returns the address of a
// function such as "cublasLtMatmul", or null. Throws UnsupportedError if a function is
// missing, or if the major version is neither 12 nor 13.
CublasLt ReadCublasLt(const std::string& path,
                      const std::function<void*(const char*)>& find);

// Loads libcublasLt.so.13 or libcublasLt.so.12: a copy that is already loaded (usually
// JAX's), or else from the search path of the dynamic loader, or else from
// `directories`, such as "site-packages/nvidia/cu13/lib". Never unloads it. Throws
// UnsupportedError with all attempts if it finds none.
CublasLt LoadCublasLt(std::span<const std::string> directories);

// Throws SystemError unless `status` is kSuccess. `what` is the function that returned
// it. The message is "cublasLtMatmul: CUBLAS_STATUS_...".
void Check(const CublasLt& library, lt::Status status, const char* what);

}  // namespace jax_ub
