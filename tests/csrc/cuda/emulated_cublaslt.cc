#include "cuda/emulated_cublaslt.h"

#include <algorithm>
#include <array>
#include <atomic>
#include <bit>
#include <cstring>
#include <utility>

#include "cuda/emulated_driver.h"
#include "cuda/emulated_machine.h"
#include "cuda/emulated_products.h"

namespace jax_ub {

namespace emulated {

namespace {

using lt::Status;

std::atomic<int64_t> num_handles = 0;
std::atomic<int64_t> num_objects = 0;
std::atomic<int64_t> num_heuristics = 0;
std::atomic<int64_t> num_matmuls = 0;
std::atomic<int64_t> last_algorithm = 0;
std::atomic<bool> finds_none = false;
std::atomic<Status> matmul_result = Status::kSuccess;
std::atomic<size_t> version = 130000;

// The workspace sizes of the algorithms, which write all of it. An algorithm with a
// workspace runs two kernels. Which algorithm is the fastest depends on the alignment of
// the matrices. The sizes exceed the arrays of tests; those of cuBLASLt, megabytes, would
// take most of the time of tests under ThreadSanitizer.
constexpr std::array<size_t, 3> kWorkspaces = {size_t{256} << 10, size_t{64} << 10, 0};

template <typename T, typename... Values>
Status Make(T** object, Values... values) {
  if (object == nullptr) return Status::kInvalidValue;
  *object = new T{values...};
  num_objects.fetch_add(1, std::memory_order_relaxed);
  return Status::kSuccess;
}

template <typename T>
Status End(T* object) {
  if (object == nullptr) return Status::kInvalidValue;
  delete object;
  num_objects.fetch_sub(1, std::memory_order_relaxed);
  return Status::kSuccess;
}

template <typename T>
Status Set(T& field, const void* value, size_t size_bytes) {
  if (value == nullptr || size_bytes != sizeof(T)) return Status::kInvalidValue;
  std::memcpy(&field, value, sizeof(T));
  return Status::kSuccess;
}

size_t GetVersion() { return version; }

const char* GetStatusName(Status status) {
  switch (status) {
    case Status::kSuccess:
      return "CUBLAS_STATUS_SUCCESS";
    case Status::kNotInitialized:
      return "CUBLAS_STATUS_NOT_INITIALIZED";
    case Status::kAllocFailed:
      return "CUBLAS_STATUS_ALLOC_FAILED";
    case Status::kInvalidValue:
      return "CUBLAS_STATUS_INVALID_VALUE";
    case Status::kArchMismatch:
      return "CUBLAS_STATUS_ARCH_MISMATCH";
    case Status::kExecutionFailed:
      return "CUBLAS_STATUS_EXECUTION_FAILED";
    case Status::kInternalError:
      return "CUBLAS_STATUS_INTERNAL_ERROR";
    case Status::kNotSupported:
      return "CUBLAS_STATUS_NOT_SUPPORTED";
  }
  return "unknown";
}

// Creates a handle for the device of the current context.
Status Create(lt::Handle* handle) {
  if (handle == nullptr) return Status::kInvalidValue;
  int device = -1;
  const CUresult result = RunInContext("cublasLtCreate", [&](Call& call) {
    device = call.device();
    return CUDA_SUCCESS;
  });
  if (result != CUDA_SUCCESS) return Status::kNotInitialized;
  const auto attribute = [&](CUdevice_attribute name) {
    int value = 0;
    EmulatedDriver().DeviceGetAttribute(&value, name, device);
    return value;
  };
  *handle =
      new lt::HandleObject{device,
                           {attribute(CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR),
                            attribute(CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR)}};
  num_handles.fetch_add(1, std::memory_order_relaxed);
  return Status::kSuccess;
}

Status Destroy(lt::Handle handle) {
  if (handle == nullptr) return Status::kInvalidValue;
  delete handle;
  num_handles.fetch_sub(1, std::memory_order_relaxed);
  return Status::kSuccess;
}

Status MatmulDescCreate(lt::MatmulDesc* desc,
                        lt::ComputeType compute,
                        lt::DataType scale) {
  if (scale != lt::DataType::kF32) return Status::kNotSupported;
  return Make(desc, compute);
}

Status MatmulDescSetAttribute(lt::MatmulDesc desc,
                              lt::DescAttribute attribute,
                              const void* value,
                              size_t size_bytes) {
  if (desc == nullptr) return Status::kInvalidValue;
  switch (attribute) {
    case lt::DescAttribute::kTransA:
      return Set(desc->transpose_a, value, size_bytes);
    case lt::DescAttribute::kTransB:
      return Set(desc->transpose_b, value, size_bytes);
    case lt::DescAttribute::kEpilogue:
      return Set(desc->epilogue, value, size_bytes);
    case lt::DescAttribute::kBiasPointer:
      return Set(desc->bias, value, size_bytes);
    case lt::DescAttribute::kBiasBatchStride:
      return Set(desc->bias_batch_stride, value, size_bytes);
    case lt::DescAttribute::kSmCountTarget:
      return Set(desc->sm_count_target, value, size_bytes);
    case lt::DescAttribute::kBiasDataType:
      return Set(desc->bias_type, value, size_bytes);
    case lt::DescAttribute::kAScaleMode:
      return Set(desc->a_scale_mode, value, size_bytes);
    case lt::DescAttribute::kBScaleMode:
      return Set(desc->b_scale_mode, value, size_bytes);
    case lt::DescAttribute::kAScalePointer:
      return Set(desc->a_scale, value, size_bytes);
    case lt::DescAttribute::kBScalePointer:
      return Set(desc->b_scale, value, size_bytes);
  }
  return Status::kInvalidValue;
}

Status MatrixLayoutCreate(lt::Layout* layout,
                          lt::DataType type,
                          uint64_t rows,
                          uint64_t columns,
                          int64_t leading) {
  return Make(layout, type, static_cast<int64_t>(rows), static_cast<int64_t>(columns),
              leading);
}

Status MatrixLayoutSetAttribute(lt::Layout layout,
                                lt::LayoutAttribute attribute,
                                const void* value,
                                size_t size_bytes) {
  if (layout == nullptr) return Status::kInvalidValue;
  switch (attribute) {
    case lt::LayoutAttribute::kBatchCount:
      return Set(layout->batch, value, size_bytes);
    case lt::LayoutAttribute::kStridedBatchOffset:
      return Set(layout->batch_stride, value, size_bytes);
  }
  return Status::kInvalidValue;
}

Status MatmulPreferenceCreate(lt::Preference* preference) { return Make(preference); }

Status MatmulPreferenceSetAttribute(lt::Preference preference,
                                    lt::PreferenceAttribute attribute,
                                    const void* value,
                                    size_t size_bytes) {
  if (preference == nullptr) return Status::kInvalidValue;
  switch (attribute) {
    case lt::PreferenceAttribute::kMaxWorkspaceBytes:
      return Set(preference->workspace_bytes, value, size_bytes);
    case lt::PreferenceAttribute::kReductionSchemeMask:
      return Set(preference->reduction_schemes, value, size_bytes);
    case lt::PreferenceAttribute::kMinAlignmentA:
      return Set(preference->alignments[0], value, size_bytes);
    case lt::PreferenceAttribute::kMinAlignmentB:
      return Set(preference->alignments[1], value, size_bytes);
    case lt::PreferenceAttribute::kMinAlignmentC:
      return Set(preference->alignments[2], value, size_bytes);
    case lt::PreferenceAttribute::kMinAlignmentD:
      return Set(preference->alignments[3], value, size_bytes);
  }
  return Status::kInvalidValue;
}

uint32_t AlignmentOf(const void* pointer) {
  const auto address = reinterpret_cast<uint64_t>(pointer);
  return address == 0
             ? 256
             : static_cast<uint32_t>(std::min<uint64_t>(address & -address, 256));
}

// The contents of an algorithm object.
struct Words {
  uint64_t number;
  uint64_t workspace_bytes;
  uint32_t alignments[4];
  uint64_t bias_alignment;
  uint64_t fingerprint;
  uint64_t magic;
  uint64_t reserved;

  static constexpr uint64_t kMagic = 0x656d756c61746564;
};
static_assert(sizeof(Words) == sizeof(lt::Algorithm));

Status MatmulAlgoGetHeuristic(lt::Handle handle,
                              lt::MatmulDesc desc,
                              lt::Layout a,
                              lt::Layout b,
                              lt::Layout c,
                              lt::Layout d,
                              lt::Preference preference,
                              int num_requested,
                              lt::HeuristicResult* results,
                              int* num_found) {
  num_heuristics.fetch_add(1, std::memory_order_relaxed);
  if (handle == nullptr || desc == nullptr || a == nullptr || b == nullptr ||
      c == nullptr || d == nullptr || preference == nullptr || num_requested < 1 ||
      results == nullptr || num_found == nullptr) {
    return Status::kInvalidValue;
  }
  *num_found = 0;
  const Product product{*desc, *a, *b, *c, *d};
  if (const Status status = CheckProduct(product, {handle->capability, version});
      status != Status::kSuccess) {
    return status;
  }
  for (int i = 0; i < 4; ++i) {
    // The minimum alignment of an address is the size of an element.
    const lt::LayoutObject* const layout = std::array{a, b, c, d}[i];
    if (preference->alignments[i] < ElementBytes(layout->type) ||
        !std::has_single_bit(preference->alignments[i])) {
      return Status::kInvalidValue;
    }
  }
  const uint64_t bias_alignment = product.has_bias() ? AlignmentOf(desc->bias) : 1;
  if (finds_none || !HasKernels(product, preference->alignments, bias_alignment)) {
    return Status::kNotSupported;
  }
  const auto alignment = *std::ranges::min_element(preference->alignments);
  for (size_t i = 0; i < kWorkspaces.size() && *num_found < num_requested; ++i) {
    const size_t workspace_bytes =
        kWorkspaces[(i + std::countr_zero(alignment) / 2) % kWorkspaces.size()];
    if (workspace_bytes > preference->workspace_bytes) continue;
    Words words = {};
    words.number = i;
    words.workspace_bytes = workspace_bytes;
    std::copy_n(preference->alignments.data(), 4, words.alignments);
    words.bias_alignment = bias_alignment;
    words.fingerprint = product.Fingerprint();
    words.magic = Words::kMagic;
    lt::HeuristicResult& result = results[(*num_found)++];
    result = {};
    std::memcpy(&result.algorithm, &words, sizeof(words));
    result.workspace_bytes = workspace_bytes;
    result.waves = 1;
  }
  return Status::kSuccess;
}

// Checks that the algorithm was found for this product, and that the addresses are
// aligned as it requires.
Status CheckAlgorithm(const Product& product,
                      const Arguments& arguments,
                      const Words& words,
                      size_t workspace_bytes) {
  if (words.magic != Words::kMagic || words.fingerprint != product.Fingerprint() ||
      words.workspace_bytes > workspace_bytes) {
    return Status::kInvalidValue;
  }
  if (words.workspace_bytes > 0 &&
      (arguments.workspace == nullptr || AlignmentOf(arguments.workspace) < 16)) {
    return Status::kInvalidValue;
  }
  const std::array pointers = {arguments.a, arguments.b,
                               arguments.beta != 0 ? arguments.c : nullptr,
                               static_cast<const void*>(arguments.d)};
  for (int i = 0; i < 4; ++i) {
    if (AlignmentOf(pointers[i]) < words.alignments[i]) return Status::kInvalidValue;
  }
  if (product.has_bias() && AlignmentOf(product.desc.bias) < words.bias_alignment) {
    return Status::kInvalidValue;
  }
  return Status::kSuccess;
}

CUresult EnqueueMatmul(lt::Handle handle,
                       const lt::Algorithm& algorithm,
                       const Product& product,
                       const Arguments& arguments,
                       CUstream stream_handle) {
  return RunInContext("cublasLtMatmul", [&](Call& call) {
    const Stream* const stream = call.FindStream(stream_handle);
    if (stream == nullptr || stream->device != handle->device) {
      return CUDA_ERROR_INVALID_HANDLE;
    }
    std::string needed(reinterpret_cast<const char*>(&algorithm), sizeof(algorithm));
    needed += arguments.beta != 0 ? "+C" : "";
    if (handle->loaded.insert(needed).second) call.Load("cublasLtMatmul");
    Operation operation;
    operation.name = "cublasLtMatmul";
    operation.touches = TouchesOf(product, arguments);
    // Its kernels are persistent: they occupy all multiprocessors that they find.
    const int target = product.desc.sm_count_target;
    operation.num_processors = target > 0 ? target : kNumProcessors;
    if (arguments.needed_bytes > 0) {
      operation.run = [arguments] {
        std::memset(arguments.workspace, 0xAB, arguments.needed_bytes);
      };
      if (const CUresult result = Enqueue(call, stream_handle, operation)) {
        return result;
      }
    }
    operation.run = [product, arguments] { Multiply(product, arguments); };
    return Enqueue(call, stream_handle, std::move(operation));
  });
}

Status Matmul(lt::Handle handle,
              lt::MatmulDesc desc,
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
              const lt::Algorithm* algorithm,
              void* workspace,
              size_t workspace_bytes,
              CUstream stream) {
  if (matmul_result.load() != Status::kSuccess) return matmul_result;
  if (handle == nullptr || desc == nullptr || a_layout == nullptr ||
      b_layout == nullptr || c_layout == nullptr || d_layout == nullptr ||
      alpha == nullptr || beta == nullptr || a == nullptr || b == nullptr ||
      d == nullptr || algorithm == nullptr) {
    return Status::kInvalidValue;
  }
  const Product product{*desc, *a_layout, *b_layout, *c_layout, *d_layout};
  if (const Status status = CheckProduct(product, {handle->capability, version});
      status != Status::kSuccess) {
    return status;
  }
  Words words;
  std::memcpy(&words, algorithm, sizeof(words));
  Arguments arguments{.a = a,
                      .b = b,
                      .c = c,
                      .d = d,
                      .workspace = workspace,
                      .needed_bytes = words.workspace_bytes};
  std::memcpy(&arguments.alpha, alpha, sizeof(float));
  std::memcpy(&arguments.beta, beta, sizeof(float));
  if ((arguments.beta != 0 && c == nullptr) ||
      (product.has_bias() && desc->bias == nullptr) ||
      (c == d && product.c != product.d)) {
    return Status::kInvalidValue;
  }
  if (const Status status = CheckAlgorithm(product, arguments, words, workspace_bytes);
      status != Status::kSuccess) {
    return status;
  }
  num_matmuls.fetch_add(1, std::memory_order_relaxed);
  last_algorithm.store(static_cast<int64_t>(words.number), std::memory_order_relaxed);
  return EnqueueMatmul(handle, *algorithm, product, arguments, stream) == CUDA_SUCCESS
             ? Status::kSuccess
             : Status::kExecutionFailed;
}

}  // namespace

}  // namespace emulated

const CublasLt& EmulatedCublasLt() {
  static const CublasLt library = [] {
    CublasLt filled;
    filled.path = "emulated";
    filled.version = emulated::GetVersion();
    filled.GetVersion = emulated::GetVersion;
    filled.GetStatusName = emulated::GetStatusName;
    filled.Create = emulated::Create;
    filled.Destroy = emulated::Destroy;
    filled.MatmulDescCreate = emulated::MatmulDescCreate;
    filled.MatmulDescDestroy = emulated::End<lt::MatmulDescObject>;
    filled.MatmulDescSetAttribute = emulated::MatmulDescSetAttribute;
    filled.MatrixLayoutCreate = emulated::MatrixLayoutCreate;
    filled.MatrixLayoutDestroy = emulated::End<lt::LayoutObject>;
    filled.MatrixLayoutSetAttribute = emulated::MatrixLayoutSetAttribute;
    filled.MatmulPreferenceCreate = emulated::MatmulPreferenceCreate;
    filled.MatmulPreferenceDestroy = emulated::End<lt::PreferenceObject>;
    filled.MatmulPreferenceSetAttribute = emulated::MatmulPreferenceSetAttribute;
    filled.MatmulAlgoGetHeuristic = emulated::MatmulAlgoGetHeuristic;
    filled.Matmul = emulated::Matmul;
    return filled;
  }();
  return library;
}

EmulatedCublasLtState ReadEmulatedCublasLt() {
  return {.num_handles = emulated::num_handles,
          .num_objects = emulated::num_objects,
          .num_heuristics = emulated::num_heuristics,
          .num_matmuls = emulated::num_matmuls,
          .last_algorithm = emulated::last_algorithm};
}

void RefuseEmulatedMatmuls(bool no_algorithms, lt::Status result) {
  emulated::finds_none = no_algorithms;
  emulated::matmul_result = result;
}

void SetEmulatedCublasLtVersion(size_t version) { emulated::version = version; }

}  // namespace jax_ub
