#include "gemm/cuda/gemm_plan_cache.h"

#include <algorithm>
#include <array>
#include <type_traits>

#include "gemm/cuda/fp8_scale_kernels.h"
#include "gemm/views.h"
#include "platform/cuda/owners.h"
#include "platform/error.h"

namespace jax_ub {

namespace {

// Maximum number of algorithms that cuBLASLt is asked to propose for a product.
// GemmOptions::algorithm selects one of them.
constexpr int kMaxAlgorithms = 8;

std::string Shape(DType dtype, int64_t rows, int64_t columns) {
  return std::string(DTypeName(dtype)) + "[" + std::to_string(rows) + ", " +
         std::to_string(columns) + "]";
}

// Calls a function of cuBLASLt that creates an object. `name` is the function's name.
template <typename Object, typename... Arguments>
Object Make(const CublasLt& library,
            lt::Status (*create)(Object*, Arguments...),
            const char* name,
            std::type_identity_t<Arguments>... arguments) {
  Object made = nullptr;
  Check(library, create(&made, arguments...), name);
  return made;
}

lt::ComputeType ComputeTypeOf(const MatmulKey& key) {
  const bool is_tf32 = key.allow_tf32 && key.a_dtype == DType::kF32;
  return is_tf32 ? lt::ComputeType::k32FFastTF32 : lt::ComputeType::k32F;
}

// Returns the number of bytes from the first to the last element of a batch of
// matrices, rounded up.
int64_t SpanBytes(const MatmulKey& key,
                  DType dtype,
                  int64_t columns,
                  const PlannedMatrix& matrix) {
  return BytesInWorkspace(
      (matrix.batch_stride * (key.batch - 1) + matrix.leading * columns) *
      SizeOf(dtype));
}

}  // namespace

std::string Describe(const MatmulKey& key) {
  std::string text = Shape(key.b_dtype, key.n, key.k) + " x " +
                     Shape(key.a_dtype, key.k, key.m) + " to " +
                     std::string(DTypeName(key.result_dtype));
  if (key.batch > 1) text += ", " + std::to_string(key.batch) + " times";
  const int64_t alignment = std::min({key.a.alignment_bytes, key.b.alignment_bytes,
                                      key.c.alignment_bytes, key.d.alignment_bytes});
  return text + ", aligned to " + std::to_string(alignment) + " bytes";
}

MatmulPlan::MatmulPlan(const CublasLt& library, lt::Handle handle, const MatmulKey& key)
    : library_(library),
      handle_(handle),
      key_(key),
      a_(MakeLayout(key.a_dtype,
                    key.transpose_a ? key.k : key.m,
                    key.transpose_a ? key.m : key.k,
                    key.a)),
      b_(MakeLayout(key.b_dtype,
                    key.transpose_b ? key.n : key.k,
                    key.transpose_b ? key.k : key.n,
                    key.b)),
      c_(MakeLayout(key.result_dtype, key.m, key.n, key.c)),
      d_(MakeLayout(key.result_dtype, key.m, key.n, key.d)),
      description_(Make(library,
                        library.MatmulDescCreate,
                        "cublasLtMatmulDescCreate",
                        ComputeTypeOf(key),
                        lt::DataType::kF32),
                   library.MatmulDescDestroy) {
  MakeDescription();
  FindAlgorithms();
}

MatmulPlan::Owned<lt::LayoutObject> MatmulPlan::MakeLayout(
    DType dtype, int64_t rows, int64_t columns, const PlannedMatrix& matrix) const {
  Owned<lt::LayoutObject> layout(
      Make(library_, library_.MatrixLayoutCreate, "cublasLtMatrixLayoutCreate",
           DataTypeOf(dtype), rows, columns, matrix.leading),
      library_.MatrixLayoutDestroy);
  if (key_.batch == 1) return layout;
  const auto set = [&](lt::LayoutAttribute attribute, auto value) {
    Check(library_,
          library_.MatrixLayoutSetAttribute(layout.get(), attribute, &value,
                                            sizeof value),
          "cublasLtMatrixLayoutSetAttribute");
  };
  set(lt::LayoutAttribute::kBatchCount, static_cast<int32_t>(key_.batch));
  set(lt::LayoutAttribute::kStridedBatchOffset, matrix.batch_stride);
  return layout;
}

void MatmulPlan::SetDescription(lt::DescAttribute attribute, auto value) {
  Check(library_,
        library_.MatmulDescSetAttribute(description_.get(), attribute, &value,
                                        sizeof value),
        "cublasLtMatmulDescSetAttribute");
}

void MatmulPlan::MakeDescription() {
  const auto operation = [](bool transpose) {
    return static_cast<int32_t>(transpose ? lt::Operation::kT : lt::Operation::kN);
  };
  SetDescription(lt::DescAttribute::kTransA, operation(key_.transpose_a));
  SetDescription(lt::DescAttribute::kTransB, operation(key_.transpose_b));
  if (key_.sm_target > 0) {
    SetDescription(lt::DescAttribute::kSmCountTarget,
                   static_cast<int32_t>(key_.sm_target));
  }
  // The addresses in this description are placeholders: the heuristics read no memory,
  // and use the bias address only for its alignment. Run sets the call's addresses.
  const auto* const any = reinterpret_cast<const void*>(kPlannedAlignmentBytes);
  if (key_.scales != Scales::kNone) {
    SetDescription(lt::DescAttribute::kAScalePointer, any);
    SetDescription(lt::DescAttribute::kBScalePointer, any);
  }
  if (key_.scales == Scales::kOuterVector || key_.scales == Scales::kBlocks) {
    const auto mode = static_cast<int32_t>(key_.scales == Scales::kBlocks
                                               ? lt::ScaleMode::kVec32
                                               : lt::ScaleMode::kOuterVector);
    SetDescription(lt::DescAttribute::kAScaleMode, mode);
    SetDescription(lt::DescAttribute::kBScaleMode, mode);
  }
  if (!key_.has_bias) return;
  SetDescription(lt::DescAttribute::kEpilogue,
                 static_cast<uint32_t>(lt::Epilogue::kBias));
  SetDescription(lt::DescAttribute::kBiasDataType,
                 static_cast<int32_t>(DataTypeOf(key_.result_dtype)));
  if (key_.batch > 1) {
    SetDescription(lt::DescAttribute::kBiasBatchStride, key_.bias_batch_stride);
  }
  SetDescription(lt::DescAttribute::kBiasPointer, any);
}

void MatmulPlan::FindAlgorithms() {
  const Owned<lt::PreferenceObject> preference(
      Make(library_, library_.MatmulPreferenceCreate, "cublasLtMatmulPreferenceCreate"),
      library_.MatmulPreferenceDestroy);
  const auto set = [&](lt::PreferenceAttribute attribute, auto value) {
    Check(library_,
          library_.MatmulPreferenceSetAttribute(preference.get(), attribute, &value,
                                                sizeof value),
          "cublasLtMatmulPreferenceSetAttribute");
  };
  set(lt::PreferenceAttribute::kMaxWorkspaceBytes,
      static_cast<uint64_t>(key_.workspace_bytes));
  // Partial sums of split-K algorithms must be stored in f32, not rounded to the dtype
  // of the result.
  if (key_.result_dtype != DType::kF32) {
    set(lt::PreferenceAttribute::kReductionSchemeMask,
        static_cast<uint32_t>(lt::ReductionScheme::kComputeType));
  }
  const auto align = [&](lt::PreferenceAttribute attribute,
                         const PlannedMatrix& matrix) {
    set(attribute, static_cast<uint32_t>(matrix.alignment_bytes));
  };
  align(lt::PreferenceAttribute::kMinAlignmentA, key_.a);
  align(lt::PreferenceAttribute::kMinAlignmentB, key_.b);
  align(lt::PreferenceAttribute::kMinAlignmentC, key_.c);
  align(lt::PreferenceAttribute::kMinAlignmentD, key_.d);

  std::array<lt::HeuristicResult, kMaxAlgorithms> found = {};
  int num_found = 0;
  heuristic_status_ = library_.MatmulAlgoGetHeuristic(
      handle_, description_.get(), a_.get(), b_.get(), c_.get(), d_.get(),
      preference.get(), kMaxAlgorithms, found.data(), &num_found);
  if (heuristic_status_ == lt::Status::kSuccess) {
    for (int i = 0; i < num_found; ++i) {
      if (found[i].state == lt::Status::kSuccess &&
          found[i].workspace_bytes <= static_cast<size_t>(key_.workspace_bytes)) {
        algorithms_.push_back(found[i].algorithm);
        workspace_bytes_.push_back(static_cast<int64_t>(found[i].workspace_bytes));
      }
    }
  } else if (heuristic_status_ != lt::Status::kNotSupported &&
             heuristic_status_ != lt::Status::kInvalidValue) {
    Check(library_, heuristic_status_, "cublasLtMatmulAlgoGetHeuristic");
  }
}

int MatmulPlan::IndexOf(int algorithm) const {
  if (!algorithms_.empty()) return std::clamp(algorithm, 0, num_algorithms() - 1);
  throw UnsupportedError("cuBLASLt " + std::to_string(library_.version) +
                         " has no algorithm for " + Describe(key_) + " (" +
                         library_.GetStatusName(heuristic_status_) +
                         "): use method=\"xla\"");
}

int64_t MatmulPlan::LargestOperandBytes() const {
  const int64_t a_columns = key_.transpose_a ? key_.m : key_.k;
  const int64_t b_columns = key_.transpose_b ? key_.k : key_.n;
  const int64_t bias_elements = key_.m + key_.bias_batch_stride * (key_.batch - 1);
  const int64_t outer = std::max(key_.m, key_.n);
  const int64_t scale_bytes = key_.scales == Scales::kBlocks
                                  ? Fp8ScaleKernels::TileBytes(outer, key_.k)
                                  : outer * SizeOf(DType::kF32);
  return std::max({SpanBytes(key_, key_.a_dtype, a_columns, key_.a),
                   SpanBytes(key_, key_.b_dtype, b_columns, key_.b),
                   SpanBytes(key_, key_.result_dtype, key_.n, key_.c),
                   BytesInWorkspace(bias_elements * SizeOf(key_.result_dtype)),
                   BytesInWorkspace(scale_bytes)});
}

void MatmulPlan::WarmUp(const Driver& driver, int algorithm, bool adds) {
  const int index = IndexOf(algorithm);
  const std::lock_guard lock(warming_mutex_);
  if (warm_.contains({index, adds})) return;
  // The result is not used, so all inputs may share the same memory.
  const int64_t read_bytes = LargestOperandBytes();
  const int64_t result_bytes = SpanBytes(key_, key_.result_dtype, key_.n, key_.d);
  const Stream stream(driver);
  {
    const StreamMemory memory(
        driver, read_bytes + result_bytes + workspace_bytes_[index], stream.get());
    auto* const data = reinterpret_cast<std::byte*>(memory.get());
    MatmulArguments arguments;
    arguments.a = arguments.b = arguments.c = arguments.bias = data;
    arguments.a_scales = arguments.b_scales = data;
    arguments.d = data + read_bytes;
    arguments.beta = adds ? 1 : 0;
    arguments.workspace = data + read_bytes + result_bytes;
    Run(arguments, index, stream.get(), workspace_bytes_[index]);
  }
  Check(driver, driver.StreamSynchronize(stream.get()), "cuStreamSynchronize");
  warm_.emplace(index, adds);
}

void MatmulPlan::Enqueue(const MatmulArguments& arguments,
                         int algorithm,
                         CUstream stream) {
  Run(arguments, IndexOf(algorithm), stream, key_.workspace_bytes);
}

void MatmulPlan::Run(const MatmulArguments& arguments,
                     int index,
                     CUstream stream,
                     int64_t workspace_bytes) {
  const auto enqueue = [&] {
    Check(library_,
          library_.Matmul(handle_, description_.get(), &arguments.alpha, arguments.a,
                          a_.get(), arguments.b, b_.get(), &arguments.beta, arguments.c,
                          c_.get(), arguments.d, d_.get(), &algorithms_[index],
                          arguments.workspace, workspace_bytes, stream),
          "cublasLtMatmul");
  };
  const bool has_scales = key_.scales != Scales::kNone;
  if (!key_.has_bias && !has_scales) return enqueue();
  const std::lock_guard lock(mutex_);
  if (key_.has_bias) SetDescription(lt::DescAttribute::kBiasPointer, arguments.bias);
  if (has_scales) {
    SetDescription(lt::DescAttribute::kAScalePointer, arguments.a_scales);
    SetDescription(lt::DescAttribute::kBScalePointer, arguments.b_scales);
  }
  enqueue();
}

GemmPlanCache::GemmPlanCache(const CublasLt& library)
    : library_(library),
      handle_(Make(library, library.Create, "cublasLtCreate"), library.Destroy) {}

MatmulPlan& GemmPlanCache::Find(const MatmulKey& key) {
  const std::lock_guard lock(mutex_);
  std::unique_ptr<MatmulPlan>& plan = plans_[key];
  if (plan == nullptr) {
    plan = std::make_unique<MatmulPlan>(library_, handle_.get(), key);
  }
  return *plan;
}

}  // namespace jax_ub
