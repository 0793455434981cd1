// What products use of cuBLASLt's C interface, declared here so that building needs no CUDA
// library and loading none that is linked: the table is filled from whatever
// libcublasLt.so JAX has loaded.
//
// Everything declared is the same in cuBLASLt 12 and 13. The objects behind the pointers
// are not (a layout of 12 is 64 bytes, of 13 it is 112): they are only ever made and ended
// by the library. Matrices are column-major, as everywhere in BLAS.
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

enum class DataType : int32_t { kF32 = 0, kF16 = 2, kBF16 = 14 };  // cudaDataType
enum class ComputeType : int32_t { k32F = 68, k32FFastTF32 = 77 };
enum class Operation : int32_t { kN = 0, kT = 1 };
enum class Epilogue : uint32_t { kDefault = 1, kBias = 4 };

// How partial sums of split contractions are kept; the first is a bit of no mask.
enum class ReductionScheme : uint32_t {
  kNone = 0,
  kInPlace = 1,      // in the result, and in its dtype
  kComputeType = 2,  // in the workspace, in f32
  kOutputType = 4,   // in the workspace, in the result's dtype
  kAll = 7,
};

// Attributes, each with the type of its value.
enum class DescAttribute : int32_t {
  kTransA = 3,            // int32_t, an Operation
  kTransB = 4,            // int32_t, an Operation
  kEpilogue = 7,          // uint32_t
  kBiasPointer = 8,       // const void*; heuristics take its alignment from its value
  kBiasBatchStride = 10,  // int64_t, in elements
  kSmCountTarget = 15,    // int32_t; 0: all of the device
  kBiasDataType = 26,     // int32_t, a DataType; that of D when not set
};
enum class LayoutAttribute : int32_t {
  kBatchCount = 5,          // int32_t
  kStridedBatchOffset = 6,  // int64_t, in elements
};
enum class PreferenceAttribute : int32_t {
  kMaxWorkspaceBytes = 1,    // uint64_t
  kReductionSchemeMask = 3,  // uint32_t
  kMinAlignmentA = 5,        // uint32_t, in bytes; 256 when not set
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
  Status state;  // kSuccess, or the rest says nothing
  float waves;
  int32_t reserved[4];
};
static_assert(sizeof(Algorithm) == 64 && sizeof(HeuristicResult) == 96);

}  // namespace lt

// The functions of one loaded library: a member is its name without "cublasLt".
struct CublasLt {
  std::string path;    // what was loaded, for reports
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
  // Best first. Where nothing fits: kNotSupported, or kSuccess and none found.
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
  // D = epilogue(alpha * op(A) * op(B) + beta * C); alpha and beta are f32 on the host,
  // read before this returns. C may be D, with the same layout.
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

// The dtype as cuBLASLt names it.
lt::DataType DataTypeOf(DType dtype);

// Fills the table with what `find` returns for "cublasLtMatmul" and the like. Throws
// UnsupportedError when a function is missing, or its version is neither 12 nor 13.
CublasLt ReadCublasLt(const std::string& path,
                      const std::function<void*(const char*)>& find);

// Loads libcublasLt.so.13 or .12, in this order: the copy that is loaded already (JAX's
// own), what the system's loader finds, then `directories` ("site-packages/nvidia/cu13/lib").
// The library stays loaded for good. Throws UnsupportedError that says what was tried.
CublasLt LoadCublasLt(std::span<const std::string> directories);

// Throws SystemError "cublasLtMatmul: CUBLAS_STATUS_..." unless it succeeded.
void Check(const CublasLt& library, lt::Status status, const char* what);

}  // namespace jax_ub
