#include "gemm/cuda/cuda_gemm.h"

#include <algorithm>
#include <optional>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "gemm/cuda/fp8_operands.h"
#include "gemm/cuda/gemm_blocks.h"
#include "gemm/cuda/gemm_plan_cache.h"
#include "platform/error.h"

namespace jax_ub {

namespace {

constexpr int64_t kNoAddend = -1;

// Which addends cuBLASLt adds to the product, as indices into GemmProblem::addends.
struct Fused {
  int64_t matrix = kNoAddend;  // passed as C
  int64_t bias = kNoAddend;    // added by the epilogue
  bool all = true;             // whether no other addends remain
};

bool IsBias(const AddendView& addend) {
  return std::all_of(
      addend.segments.begin(), addend.segments.end(),
      [](const AddendSegment& segment) { return segment.row_stride == 0; });
}

Fused FuseAddends(const GemmProblem& problem) {
  Fused fused;
  for (size_t i = 0; i < problem.addends.size(); ++i) {
    const AddendView& addend = problem.addends[i];
    int64_t& index = IsBias(addend) ? fused.bias : fused.matrix;
    if (addend.dtype == problem.c.dtype && index == kNoAddend) {
      index = static_cast<int64_t>(i);
    } else {
      fused.all = false;
    }
  }
  return fused;
}

// Returns whether cuBLASLt can store the final result, including the addends. The
// answer does not depend on addresses, so that the size of the workspace does not
// depend on them.
bool IsSummedInResult(const GemmProblem& problem, const Fused& fused) {
  const int64_t num_terms = MaxTerms(problem);
  if (num_terms == 0) return problem.addends.empty();
  if (!fused.all) return false;
  if (problem.c.dtype == DType::kF32) return true;
  const bool has_kernels = problem.c.dtype == problem.a.dtype || IsFp8(problem.a.dtype);
  return has_kernels && num_terms == 1;
}

// Returns whether the addends can be stored in the result before the GEMM adds the
// product, without an additional rounding to 16 bits. This holds for a single addend,
// which is stored unchanged, and for f32 results.
bool CanAddBefore(const GemmProblem& problem) {
  return problem.addends.size() == 1 || problem.c.dtype == DType::kF32;
}

// Returns the size in bytes of the f32 sum in the workspace, or 0 if none is needed.
int64_t SumBytes(const GemmProblem& problem) {
  if (IsSummedInResult(problem, FuseAddends(problem)) &&
      (problem.addends.empty() || CanAddBefore(problem))) {
    return 0;
  }
  return BytesInWorkspace(problem.m * problem.n * SizeOf(DType::kF32));
}

// Returns the alignment in bytes of all matrices of a batch: the largest power of two
// that divides their addresses, but at most kPlannedAlignmentBytes.
int64_t AlignmentOf(const void* data, int64_t batch_stride, DType dtype) {
  const uint64_t bits = reinterpret_cast<uintptr_t>(data) |
                        static_cast<uint64_t>(batch_stride * SizeOf(dtype)) |
                        kPlannedAlignmentBytes;
  return static_cast<int64_t>(bits & (~bits + 1));
}

PlannedMatrix Planned(const BlockOperand& operand, DType dtype) {
  return {operand.line_stride, operand.batch_stride,
          AlignmentOf(operand.data, operand.batch_stride, dtype)};
}

PlannedMatrix Planned(const BlockMatrix& matrix,
                      const GemmBlock& block,
                      DType dtype,
                      const char* name) {
  const int64_t m = block.m;
  const int64_t n = block.n;
  // The row stride of a matrix with a single row has no meaning, so a stride that is
  // smaller than the row is accepted.
  const int64_t leading = m == 1 ? std::max(matrix.row_stride, n) : matrix.row_stride;
  if (leading < n) {
    throw std::invalid_argument(
        "GEMM: rows of " + std::string(name) + " [" + std::to_string(m) + ", " +
        std::to_string(n) + "] overlap: their stride is " + std::to_string(leading));
  }
  return {leading, matrix.batch_stride,
          AlignmentOf(matrix.data, matrix.batch_stride, dtype)};
}

// Returns which kind of FP8 scales the operands of a term have.
Scales ModeOf(const GemmProblem& problem, const BlockTerm& term) {
  for (const OperandView* operand : {&problem.a, &problem.b}) {
    if (operand->scales.empty()) continue;
    return operand->scale_dtype == DType::kE8M0 ? Scales::kBlocks
                                                : Scales::kOuterVector;
  }
  if (term.factors.empty()) return Scales::kNone;
  const bool is_scalar = term.factors[0].is_one() && term.factors[1].is_one();
  return is_scalar ? Scales::kScalar : Scales::kOuterVector;
}

// Returns the part of the plan key that describes the operands of a term. A and B are
// swapped, because cuBLASLt computes the transposed product.
MatmulKey OperandsOf(const GemmBlock& block,
                     const BlockTerm& term,
                     const GemmProblem& problem) {
  MatmulKey key;
  key.a_dtype = problem.b.dtype;
  key.b_dtype = problem.a.dtype;
  key.scales = ModeOf(problem, term);
  key.m = block.n;
  key.n = block.m;
  key.k = term.k;
  key.batch = block.batch;
  key.transpose_a = term.b.lines_run_along_k;
  key.transpose_b = !term.a.lines_run_along_k;
  key.a = Planned(term.b, key.a_dtype);
  key.b = Planned(term.a, key.b_dtype);
  return key;
}

}  // namespace

class CudaGemm::State {
 public:
  State(const CublasLt& library, const Driver& driver, const SumKernels& sums)
      : driver_(driver), sums_(sums), operands_(driver, sums), plans_(library) {}

  // Enqueues all GEMMs of the product or, if `stream` is nullopt, only prepares them.
  // Returns the largest number of cuBLASLt algorithms for any of these GEMMs.
  int Run(const GemmProblem& problem,
          const GemmOptions& options,
          const GemmWorkspace& workspace,
          std::optional<CUstream> stream) {
    const std::vector<GemmBlock> blocks = CutIntoBlocks(problem);
    CheckDTypes(problem);
    const Pass pass = MakePass(problem, options, workspace, stream);
    int num_algorithms = 1;
    for (const GemmBlock& block : blocks) {
      const Addition addition = AdditionOf(pass, block);
      if (stream && addition == Addition::kBefore) StoreAddends(pass, block);
      num_algorithms = std::max(num_algorithms, Multiply(pass, block, addition));
      if (stream && addition == Addition::kAfter) Finish(pass, block);
      if (stream && addition == Addition::kFused && block.terms.empty()) {
        Clear(pass, block);
      }
    }
    return num_algorithms;
  }

 private:
  struct Pass {
    const GemmProblem& problem;
    const GemmOptions& options;
    std::optional<CUstream> stream;
    Fused fused;
    bool in_result = false;
    // Address of the f32 sum of one block. Blocks use it one after the other, for
    // Addition::kAfter.
    CUdeviceptr sums = 0;
    Fp8Copy copy_of_a = {};
    Fp8Copy copy_of_b = {};
    CUdeviceptr library = 0;  // the workspace for cuBLASLt
    int64_t library_bytes = 0;
  };

  // How the addends are added to a block of the result.
  enum class Addition {
    kFused,   // by cuBLASLt, as its C and its bias; also if there are none
    kBefore,  // stored in the result, to which cuBLASLt adds the product
    kAfter,   // to the f32 sum of the products
  };

  static void CheckDTypes(const GemmProblem& problem) {
    const bool is_fp8 = IsFp8(problem.a.dtype) && IsFp8(problem.b.dtype);
    if (problem.a.dtype != problem.b.dtype && !is_fp8) {
      throw std::invalid_argument(
          "GEMM: the operands have two dtypes, a GPU needs one");
    }
    if (!problem.factors.empty() &&
        (!is_fp8 || problem.factors.size() != kMaxFactors)) {
      throw std::invalid_argument(
          "GEMM: a GPU multiplies only FP8 operands by factors");
    }
    CheckScales(problem);
  }

  static Pass MakePass(const GemmProblem& problem,
                       const GemmOptions& options,
                       const GemmWorkspace& workspace,
                       std::optional<CUstream> stream) {
    Pass pass{problem, options, stream, FuseAddends(problem)};
    pass.in_result = IsSummedInResult(problem, pass.fused);
    int64_t used_bytes = 0;
    pass.sums = workspace.data;
    used_bytes += SumBytes(problem);
    const auto copy_of = [&](const OperandView& operand) {
      const Fp8Copy copy(operand, options.transposes_fp8, workspace.data + used_bytes);
      used_bytes += copy.size_bytes();
      return copy;
    };
    pass.copy_of_a = copy_of(problem.a);
    pass.copy_of_b = copy_of(problem.b);
    pass.library = workspace.data + used_bytes;
    pass.library_bytes =
        std::min(kLibraryWorkspaceBytes, workspace.size_bytes - used_bytes);
    if (pass.library_bytes < 0 || workspace.data % kWorkspaceAlignmentBytes != 0) {
      throw std::invalid_argument(
          "GEMM: the workspace has " + std::to_string(workspace.size_bytes) +
          " bytes at " + std::to_string(workspace.data) + ", expected " +
          std::to_string(WorkspaceBytes(problem, options.transposes_fp8)) +
          " at a multiple of " + std::to_string(kWorkspaceAlignmentBytes));
    }
    return pass;
  }

  // Chooses how the addends, such as a bias, are added to a block of the result. The
  // choice depends on addresses only by their alignment.
  Addition AdditionOf(const Pass& pass, const GemmBlock& block) {
    if (!pass.in_result) return Addition::kAfter;
    if (pass.problem.addends.empty()) return Addition::kFused;
    MatmulKey key = KeyOf(pass, block, 0, block.c, pass.problem.c.dtype);
    MatmulArguments arguments;
    if (AddFused(pass, block, key, arguments) &&
        plans_.Find(key).num_algorithms() > 0) {
      return Addition::kFused;
    }
    return CanAddBefore(pass.problem) ? Addition::kBefore : Addition::kAfter;
  }

  // Returns the key of a product's plan in the plan cache. The product is the part of
  // the GEMM over one interval of K (a term), without addends.
  static MatmulKey KeyOf(const Pass& pass,
                         const GemmBlock& block,
                         size_t term,
                         const BlockMatrix& to,
                         DType result_dtype) {
    MatmulKey key = OperandsOf(block, MultipliedTerm(pass, block, term), pass.problem);
    key.result_dtype = result_dtype;
    key.allow_tf32 = pass.options.allow_tf32;
    key.sm_target = pass.options.sm_target;
    key.workspace_bytes = pass.library_bytes;
    key.d = Planned(to, block, result_dtype, "the result");
    key.c = key.d;
    return key;
  }

  // Returns the operands that cuBLASLt multiplies for term `index` of the block. If
  // CopyOperands copies an operand to the workspace, this is the copy.
  static BlockTerm MultipliedTerm(const Pass& pass,
                                  const GemmBlock& block,
                                  size_t index) {
    BlockTerm term = block.terms[index];
    term.a = pass.copy_of_a.Multiplied(term.a, block.m, term.k);
    term.b = pass.copy_of_b.Multiplied(term.b, block.n, term.k);
    return term;
  }

  // Enqueues kernels that copy operands and their scales to the workspace, if cuBLASLt
  // cannot read them in place.
  void CopyOperands(const Pass& pass,
                    const GemmBlock& block,
                    const BlockTerm& term) const {
    const GemmProblem& problem = pass.problem;
    operands_.Enqueue(*pass.stream, pass.copy_of_a, term.a, problem.a.dtype, block.m,
                      term.k, block.batch);
    operands_.Enqueue(*pass.stream, pass.copy_of_b, term.b, problem.b.dtype, block.n,
                      term.k, block.batch);
  }

  // Returns the address of an operand's scales for cuBLASLt, or null if the operand has
  // none. `side` is 0 for A, whose scales may be factors of the result's rows, and 1
  // for B, whose scales may be factors of its columns.
  static const void* ScalesOf(const OperandView& operand,
                              const Fp8Copy& copy,
                              const BlockTerm& term,
                              size_t side) {
    if (!operand.scales.empty()) return reinterpret_cast<const void*>(copy.scales());
    return term.factors.empty() ? nullptr : term.factors[side].data;
  }

  // Computes the sum of all terms of a block, in the result or, if addends are added
  // later, in pass.sums. Returns the largest number of cuBLASLt algorithms for any
  // term.
  int Multiply(const Pass& pass, const GemmBlock& block, Addition addition) {
    const bool in_result = addition != Addition::kAfter;
    const DType dtype = in_result ? pass.problem.c.dtype : DType::kF32;
    const BlockMatrix to = in_result
                               ? block.c
                               : BlockMatrix{reinterpret_cast<std::byte*>(pass.sums),
                                             block.n, block.m * block.n};
    int num_algorithms = 1;
    for (size_t t = 0; t < block.terms.size(); ++t) {
      const BlockTerm term = MultipliedTerm(pass, block, t);
      MatmulKey key = KeyOf(pass, block, t, to, dtype);
      MatmulArguments arguments;
      arguments.a_scales = ScalesOf(pass.problem.b, pass.copy_of_b, term, 1);
      arguments.b_scales = ScalesOf(pass.problem.a, pass.copy_of_a, term, 0);
      arguments.a = term.b.data;
      arguments.b = term.a.data;
      arguments.c = to.data;
      arguments.d = to.data;
      arguments.alpha = pass.problem.scale;
      arguments.beta = t == 0 && addition != Addition::kBefore ? 0 : 1;
      arguments.workspace = reinterpret_cast<void*>(pass.library);
      if (t == 0 && addition == Addition::kFused) AddFused(pass, block, key, arguments);
      MatmulPlan& plan = plans_.Find(key);
      num_algorithms = std::max(num_algorithms, plan.num_algorithms());
      if (pass.stream) {
        CopyOperands(pass, block, block.terms[t]);
        plan.Enqueue(arguments, pass.options.algorithm, *pass.stream);
      } else {
        plan.WarmUp(driver_, pass.options.algorithm, arguments.beta != 0);
      }
    }
    return num_algorithms;
  }

  // Sets the addends in `key` and `arguments`, so that cuBLASLt's matmul adds them as
  // its C and its bias. Returns false if the bias is not aligned as the kernels of
  // cuBLASLt require.
  static bool AddFused(const Pass& pass,
                       const GemmBlock& block,
                       MatmulKey& key,
                       MatmulArguments& arguments) {
    const DType dtype = key.result_dtype;
    if (pass.fused.matrix != kNoAddend) {
      const BlockMatrix& matrix = block.addends[pass.fused.matrix];
      key.c = Planned(matrix, block, dtype, "an addend");
      arguments.c = matrix.data;
      arguments.beta = 1;
    }
    if (pass.fused.bias == kNoAddend) return true;
    const BlockMatrix& bias = block.addends[pass.fused.bias];
    key.has_bias = true;
    key.bias_batch_stride = bias.batch_stride;
    arguments.bias = bias.data;
    return AlignmentOf(bias.data, bias.batch_stride, dtype) == kPlannedAlignmentBytes;
  }

  // Stores the sum of the addends in the result, to which cuBLASLt then adds the
  // product.
  void StoreAddends(const Pass& pass, const GemmBlock& block) const {
    for (int64_t b = 0; b < block.batch; ++b) Sum(pass, block, b, {});
  }

  // Adds pass.sums and all addends, rounds once, and stores the result.
  void Finish(const Pass& pass, const GemmBlock& block) const {
    for (int64_t b = 0; b < block.batch; ++b) {
      const int64_t offset = b * block.m * block.n * SizeOf(DType::kF32);
      Sum(pass, block, b,
          block.terms.empty()
              ? std::nullopt
              : std::optional(SumPart{pass.sums + offset, block.n, DType::kF32}));
    }
  }

  // Stores the sum of all addends, and of `first` if given, in matrix `batch` of the
  // result.
  void Sum(const Pass& pass,
           const GemmBlock& block,
           int64_t batch,
           const std::optional<SumPart>& first) const {
    const auto part = [&](const BlockMatrix& matrix, DType dtype) {
      return SumPart{
          AddressOf(matrix.data + batch * matrix.batch_stride * SizeOf(dtype)),
          matrix.row_stride, dtype};
    };
    SumParams params = {};
    params.rows = block.m;
    params.columns = block.n;
    params.out = part(block.c, pass.problem.c.dtype);
    if (first) params.parts[params.num_parts++] = *first;
    for (size_t i = 0; i < block.addends.size(); ++i) {
      params.parts[params.num_parts++] =
          part(block.addends[i], pass.problem.addends[i].dtype);
    }
    sums_.Sum(*pass.stream, params);
  }

  // Sets the result to zero. Used if K = 0 and there are no addends.
  void Clear(const Pass& pass, const GemmBlock& block) const {
    const int64_t element_bytes = SizeOf(pass.problem.c.dtype);
    for (int64_t b = 0; b < block.batch; ++b) {
      for (int64_t row = 0; row < block.m; ++row) {
        const int64_t offset = b * block.c.batch_stride + row * block.c.row_stride;
        Check(driver_,
              driver_.MemsetD8Async(AddressOf(block.c.data + offset * element_bytes), 0,
                                    block.n * element_bytes, *pass.stream),
              "cuMemsetD8Async");
      }
    }
  }

  const Driver& driver_;
  const SumKernels& sums_;
  const Fp8Operands operands_;
  GemmPlanCache plans_;
};

CudaGemm::CudaGemm(const CublasLt& library,
                   const Driver& driver,
                   const SumKernels& sums)
    : state_(std::make_unique<State>(library, driver, sums)) {}

CudaGemm::~CudaGemm() = default;

int64_t CudaGemm::WorkspaceBytes(const GemmProblem& problem, bool transposes_fp8) {
  CheckScales(problem);
  return SumBytes(problem) + Fp8Copy(problem.a, transposes_fp8, 0).size_bytes() +
         Fp8Copy(problem.b, transposes_fp8, 0).size_bytes() + kLibraryWorkspaceBytes;
}

int CudaGemm::Prepare(const GemmProblem& problem,
                      const GemmOptions& options,
                      const GemmWorkspace& workspace) {
  return state_->Run(problem, options, workspace, std::nullopt);
}

void CudaGemm::Enqueue(const GemmProblem& problem,
                       const GemmOptions& options,
                       const GemmWorkspace& workspace,
                       CUstream stream) {
  state_->Run(problem, options, workspace, stream);
}

}  // namespace jax_ub
