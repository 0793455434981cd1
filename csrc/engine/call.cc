#include "engine/call.h"

#include <algorithm>
#include <array>
#include <bit>
#include <sstream>
#include <stdexcept>

#include "engine/communicated_tensors.h"
#include "platform/error.h"
#include "platform/hash.h"

namespace jax_ub {

namespace {

constexpr std::string_view kScalesPer = ", scales per ";

// Names of the attributes that Numbers returns, for error messages. These attributes
// must be equal on all ranks.
constexpr std::array<std::string_view, 11> kNumberNames = {
    "num_ranks", "num_splits",   "num_kernels",     "rhs_transposed",
    "has_bias",  "has_residual", "return_gathered", "accumulate",
    "gather",    "has_scales",   "has_row_scales"};

std::array<int64_t, kNumberNames.size()> Numbers(const CallAttributes& at) {
  return {at.num_ranks,       at.num_splits,    at.num_kernels,
          at.rhs_transposed,  at.has_bias,      at.has_residual,
          at.return_gathered, at.accumulate,    static_cast<int64_t>(at.gather),
          at.has_scales,      at.has_row_scales};
}

// Checks operands and results against the requirements of the op. Throws ShapeError.
class Contract {
 public:
  Contract(const CallAttributes& attributes, const RankCall& call)
      : attributes_(attributes), call_(call) {}

  void Count(size_t num_operands, size_t num_results) const {
    if (call_.operands.size() != num_operands || call_.results.size() != num_results) {
      std::ostringstream text;
      text << "takes " << num_operands << " operands and " << num_results
           << " results, got " << call_.operands.size() << " and "
           << call_.results.size();
      Fail(text.str());
    }
  }

  void Operand(size_t index, const char* name, Tensor want) const {
    Expect(call_.operands[index], name, want);
  }

  void Result(size_t index, const char* name, Tensor want) const {
    Expect(call_.results[index], name, want);
  }

  // Checks that an operand or result has the shape of `want`, and one of the dtypes to
  // which a GEMM can round its result. Ignores want.dtype.
  void Sized(const Tensor& got, const char* name, Tensor want) const {
    want.dtype = InfoOf(got.dtype).is_result ? got.dtype : DType::kF32;
    Expect(got, name, want);
  }

  // Checks the bias and the residual that the call adds to a result `y`. `bias` and
  // `residual` are operand indices. An operand that the call does not have is not
  // checked.
  void Addends(size_t bias, size_t residual, const Tensor& y) const {
    const Tensor row = {y.dtype, 1, 1, y.features, nullptr};
    if (attributes_.has_bias) Sized(call_.operands[bias], "bias", row);
    if (attributes_.has_residual) Sized(call_.operands[residual], "residual", y);
  }

  // Checks the shape and dtype of GEMM operand `index`. In an FP8 call, the operand may
  // have any dtype that a GEMM accepts. In other calls, it must have the dtype `first`
  // of the first operand.
  void Factor(size_t index, const char* name, DType first, Tensor want) const {
    const DType dtype = call_.operands[index].dtype;
    want.dtype = attributes_.has_scales && InfoOf(dtype).is_operand ? dtype : first;
    Operand(index, name, want);
  }

  // Checks the scale arrays. If a GEMM operand is FP8, each GEMM operand must have a
  // scale array. Otherwise, the call must have no scale arrays.
  void Scales() const {
    if (call_.scales.size() != NumScales(attributes_)) {
      Fail("takes " + std::to_string(NumScales(attributes_)) + " scales, got " +
           std::to_string(call_.scales.size()));
    }
    // A call without scales has GEMM operands of a single dtype, so only the first
    // operand is checked.
    const auto first = call_.operands.begin();
    const auto end = first + std::max<size_t>(1, call_.scales.size());
    const bool has_fp8 = std::ranges::any_of(first, end, IsFp8, &Tensor::dtype);
    if (has_fp8 != attributes_.has_scales) {
      Fail(Describe(*first) + ", has_scales = " + std::to_string(!has_fp8));
    }
    for (size_t i = 0; i < call_.scales.size(); ++i) {
      const Tensor& scales = call_.scales[i];
      if (!attributes_.has_row_scales) {
        Expect(scales, "a scale", {DType::kF32, 1, 1, 1, nullptr});
      } else if (!AreScalesOf(scales, call_.operands[i], IsKernel(i))) {
        Fail("scales " + Describe(scales) + " do not fit " +
             Describe(call_.operands[i]));
      } else if (scales.dtype != call_.scales[FirstOfKind(i)].dtype) {
        Fail("scales have different dtypes");
      }
    }
  }

  // Checks that a tensor has at least one element. Accepts any shape and dtype.
  void NotEmpty(const Tensor& got, const char* name) const { Expect(got, name, got); }

  void Divides(const char* what, int64_t size) const {
    if (size % attributes_.num_ranks != 0) {
      std::ostringstream text;
      text << what << " has " << size
           << " rows, which num_ranks = " << attributes_.num_ranks
           << " does not divide";
      Fail(text.str());
    }
  }

  [[noreturn]] void Fail(const std::string& text) const {
    throw ShapeError("jax_ub." + attributes_.label + ": " + text);
  }

 private:
  // Returns the index of the first kernel among the GEMM operands. The kernels follow
  // the activations. A weight gradient has no kernel, so the number of operands is
  // returned.
  size_t FirstKernel() const {
    const GemmKind gemm = InfoOf(attributes_.op).gemm;
    if (gemm == GemmKind::kGatheredRows) return 1;
    return gemm == GemmKind::kWgrad ? call_.operands.size() : attributes_.num_kernels;
  }
  bool IsKernel(size_t operand) const { return operand >= FirstKernel(); }

  // Returns the index of the first operand of the same kind (activation, kernel or dy).
  // The scales of all operands of a kind must have the same dtype.
  size_t FirstOfKind(size_t operand) const {
    if (InfoOf(attributes_.op).gemm == GemmKind::kWgrad) return operand > 0;
    return IsKernel(operand) ? FirstKernel() : 0;
  }

  // Returns whether the operand `of` may have scales of this shape. Each row of any
  // operand, each column of a kernel, or a whole kernel may have an f32 scale. Each
  // block of 32 features of any operand, or of 32 rows of a kernel, may have an e8m0
  // scale.
  static bool AreScalesOf(const Tensor& scales, const Tensor& of, bool is_kernel) {
    constexpr int64_t kBlock = 32;
    if (scales.batch != of.batch) return false;
    const bool is_rows = scales.rows == of.rows;
    const bool is_features = scales.features == of.features;
    if (scales.dtype == DType::kE8M0) {
      return (is_rows && scales.features * kBlock == of.features) ||
             (is_kernel && scales.rows * kBlock == of.rows && is_features);
    }
    return scales.dtype == DType::kF32 &&
           ((scales.features == 1 && is_rows) ||
            (is_kernel && scales.rows == 1 && (is_features || scales.features == 1)));
  }

  void Expect(const Tensor& got, const char* name, const Tensor& want) const {
    if (got.dtype != want.dtype || got.batch != want.batch || got.rows != want.rows ||
        got.features != want.features || got.num_elements() <= 0) {
      Fail(std::string(name) + " is " + Describe(got) + ", expected " + Describe(want) +
           (got.num_elements() <= 0 ? ", not empty" : ""));
    }
  }

  const CallAttributes& attributes_;
  const RankCall& call_;
};

Tensor Matrix(DType dtype, int64_t rows, int64_t features) {
  return {dtype, 1, rows, features, nullptr};
}

Tensor Kernel(const CallAttributes& at, DType dtype, int64_t in, int64_t out) {
  return HasTransposedKernels(at) ? Matrix(dtype, out, in) : Matrix(dtype, in, out);
}

// Returns the number of ranks among which the rows of the result are divided. This is
// num_ranks in a reduce-scatter. Otherwise it is 1, because every rank gets all rows.
int64_t NumOwners(const CallAttributes& at) {
  const CollectiveKind kind = InfoOf(at.op).collective;
  return IsGather(kind) || IsAllReduce(kind) ? 1 : at.num_ranks;
}

int64_t OutOf(const CallAttributes& at, const Tensor& kernel) {
  return HasTransposedKernels(at) ? kernel.rows : kernel.features;
}

void CheckGatheredRows(const CallAttributes& at,
                       const RankCall& call,
                       const Contract& contract) {
  const size_t n = at.num_kernels;
  const Tensor& x = call.operands[0];
  contract.NotEmpty(x, "x");
  const int64_t rows = at.num_ranks * x.rows;
  for (size_t i = 0; i < n; ++i) {
    const int64_t out = OutOf(at, call.operands[1 + i]);
    contract.Factor(1 + i, "w", x.dtype, Kernel(at, x.dtype, x.features, out));
    const Tensor y = {x.dtype, x.batch, rows, out, nullptr};
    contract.Addends(1 + n + i, FirstResidual(at) + i, y);
    contract.Sized(call.results[i], "y", y);
  }
  if (at.return_gathered) {
    contract.Result(n, "gathered x", {x.dtype, x.batch, rows, x.features, nullptr});
    if (at.has_row_scales && !call.scales.empty()) {
      Tensor scales = call.scales[0];
      scales.rows = rows;
      contract.Result(n + 1, "gathered scales", scales);
    }
  }
}

// Checks an op that sums over operand pairs: y = sum of x_i w_i, or dx = sum of dy_i
// w_i^T. All w_i must have the dtype of w_0. In an FP8 call, w_0 may have any dtype
// that a GEMM accepts. In other calls, it must have the dtype of x.
void CheckPairSum(const CallAttributes& at,
                  const RankCall& call,
                  const Contract& contract) {
  const size_t n = at.num_kernels;
  const bool is_dgrad = InfoOf(at.op).gemm == GemmKind::kDgrad;
  const Tensor& x = call.operands[0];
  const Tensor& w = call.operands[n];
  const int64_t num_owners = NumOwners(at);
  if (num_owners > 1) contract.Divides("x", x.rows);
  const int64_t out = OutOf(at, w);
  for (size_t i = 0; i < n; ++i) {
    const int64_t in = call.operands[i].features;
    contract.Operand(i, is_dgrad ? "dy" : "x", {x.dtype, x.batch, x.rows, in, nullptr});
    if (i == 0) {
      contract.Factor(n, "w", x.dtype, Kernel(at, x.dtype, in, out));
    } else {
      contract.Operand(n + i, "w", Kernel(at, w.dtype, in, out));
    }
  }
  const Tensor y = {x.dtype, x.batch, x.rows / num_owners, out, nullptr};
  contract.Addends(2 * n, FirstResidual(at), y);
  contract.Sized(call.results[0], is_dgrad ? "dx" : "y", y);
}

void CheckWgrad(const CallAttributes& at,
                const RankCall& call,
                const Contract& contract) {
  const size_t n = at.num_kernels;
  const Tensor& x = call.operands[0];
  int64_t dy_rows = x.rows;
  if (at.gather == Gather::kX) dy_rows = x.rows * at.num_ranks;
  if (at.gather == Gather::kDy) {
    contract.Divides("x", x.rows);
    dy_rows = x.rows / at.num_ranks;
  }
  contract.NotEmpty(x, "x");
  for (size_t i = 0; i < n; ++i) {
    const int64_t out = call.operands[1 + i].features;
    contract.Factor(1 + i, "dy", x.dtype, {x.dtype, x.batch, dy_rows, out, nullptr});
    const Tensor dw = Matrix(x.dtype, x.features, out);
    if (at.accumulate) contract.Sized(call.operands[1 + n + i], "main_grad", dw);
    contract.Sized(call.results[i], "dw", dw);
  }
}

// Checks operand, result, bias and residual of a plain collective, or of the collective
// of a bulk op. No GEMM reads the data of these collectives.
void CheckCommunicated(const CallAttributes& at,
                       const RankCall& call,
                       const Contract& contract) {
  const Tensor& from = call.operands[CommunicatedOperands(at, call)[0]];
  const Tensor& to = call.results.back();
  const bool is_gathered = IsGather(InfoOf(at.op).collective);
  const int64_t num_owners = NumOwners(at);
  contract.NotEmpty(from, "the operand that is communicated");
  if (num_owners > 1) contract.Divides("the operand", from.rows);
  Tensor want = from;
  want.rows = is_gathered ? from.rows * at.num_ranks : from.rows / num_owners;
  if (is_gathered) {
    contract.Result(call.results.size() - 1, "the gathered result", want);
  } else {
    contract.Sized(from, "the operand that is communicated", from);
    contract.Addends(1, FirstResidual(at), want);
    contract.Sized(to, "the communicated result", want);
  }
}

// Checks that the call has as many operands and results as its op takes.
void CheckCounts(const CallAttributes& at, const Contract& contract) {
  const OpInfo& info = InfoOf(at.op);
  const size_t n = at.num_kernels;
  const size_t num_separate = info.communicated == Communicated::kSeparateOperand;
  const auto expect = [&](size_t num_operands, size_t num_results) {
    contract.Count(num_operands + num_separate, num_results + num_separate);
  };
  switch (info.gemm) {
    case GemmKind::kNone:
      return expect(at.has_bias + at.has_residual, 0);
    case GemmKind::kGatheredRows:
      return expect(1 + n * (1 + at.has_bias + at.has_residual),
                    n + at.return_gathered * (1 + at.has_row_scales));
    case GemmKind::kPairSum:
    case GemmKind::kDgrad:
      return expect(2 * n + at.has_bias + at.has_residual, 1);
    case GemmKind::kWgrad:
      return expect(1 + n * (1 + at.accumulate), n);
  }
}

}  // namespace

size_t NumScales(const CallAttributes& at) {
  if (!at.has_scales) return 0;
  const GemmKind gemm = InfoOf(at.op).gemm;
  const bool is_pair_sum = gemm == GemmKind::kPairSum || gemm == GemmKind::kDgrad;
  return is_pair_sum ? 2 * at.num_kernels : 1 + at.num_kernels;
}

void SplitScales(const CallAttributes& at, RankCall& call) {
  // A call with too few operands may have fewer scales. CheckCall, which runs later,
  // reports the wrong number of operands.
  const size_t num_scales = std::min(NumScales(at), call.operands.size());
  call.scales.assign(call.operands.end() - num_scales, call.operands.end());
  call.operands.resize(call.operands.size() - num_scales);
}

bool HasTransposedKernels(const CallAttributes& at) {
  return at.rhs_transposed || InfoOf(at.op).gemm == GemmKind::kDgrad;
}

size_t FirstResidual(const CallAttributes& at) {
  const size_t n = at.num_kernels;
  const GemmKind gemm = InfoOf(at.op).gemm;
  if (gemm == GemmKind::kGatheredRows) return 1 + n * (at.has_bias ? 2 : 1);
  return (gemm == GemmKind::kNone ? 1 : 2 * n) + at.has_bias;
}

bool IsLocalCall(const CallAttributes& at) {
  const Communicated communicated = InfoOf(at.op).communicated;
  return at.ranks.empty() || communicated == Communicated::kNothing ||
         (communicated == Communicated::kSelectedOperand && at.gather == Gather::kNone);
}

std::unordered_map<int64_t, size_t> FlatRankOfDevice(const CallAttributes& at) {
  const auto reject = [&](const std::string& text) {
    throw std::invalid_argument("jax_ub." + at.label + ": " + text);
  };
  if (at.num_ranks < 1) reject("num_ranks is " + std::to_string(at.num_ranks));
  if (at.num_kernels < 1) reject("num_kernels is " + std::to_string(at.num_kernels));
  if (at.num_splits < 0) reject("num_splits is " + std::to_string(at.num_splits));
  if (at.has_row_scales && !at.has_scales) reject("has_row_scales without has_scales");
  if (at.ranks.empty() && at.num_ranks != 1) {
    reject("a local op has num_ranks = " + std::to_string(at.num_ranks));
  }
  if (at.ranks.size() % static_cast<size_t>(at.num_ranks) != 0) {
    reject("ranks lists " + std::to_string(at.ranks.size()) +
           " devices, no multiple of num_ranks = " + std::to_string(at.num_ranks));
  }
  std::unordered_map<int64_t, size_t> flat_ranks;
  for (size_t flat_rank = 0; flat_rank < at.ranks.size(); ++flat_rank) {
    if (!flat_ranks.emplace(at.ranks[flat_rank], flat_rank).second) {
      reject("ranks lists device " + std::to_string(at.ranks[flat_rank]) + " twice");
    }
  }
  return flat_ranks;
}

std::string Describe(const Tensor& tensor) {
  std::ostringstream text;
  text << DTypeName(tensor.dtype) << '[';
  if (tensor.batch != 1) text << tensor.batch << ", ";
  text << tensor.rows << ", " << tensor.features << ']';
  return text.str();
}

void CheckCall(const CallAttributes& at, const RankCall& call) {
  const Contract contract(at, call);
  const OpInfo& info = InfoOf(at.op);
  CheckCounts(at, contract);
  switch (info.gemm) {
    case GemmKind::kNone:
      break;
    case GemmKind::kGatheredRows:
      CheckGatheredRows(at, call, contract);
      break;
    case GemmKind::kPairSum:
    case GemmKind::kDgrad:
      CheckPairSum(at, call, contract);
      break;
    case GemmKind::kWgrad:
      CheckWgrad(at, call, contract);
      break;
  }
  if (info.gemm != GemmKind::kNone) contract.Scales();
  if (info.communicated == Communicated::kSeparateOperand) {
    CheckCommunicated(at, call, contract);
  }
}

uint64_t Signature(const CallAttributes& at, const RankCall& call) {
  uint64_t hash = Mix(kHashBegin, at.label);
  const auto add = [&](uint64_t value) { hash = Mix(hash, value); };
  add(static_cast<uint64_t>(at.op));
  add(static_cast<uint64_t>(at.method));
  add(static_cast<uint64_t>(at.variant));
  for (const int64_t number : Numbers(at)) add(static_cast<uint64_t>(number));
  add(std::bit_cast<uint32_t>(at.scale));
  for (const std::vector<Tensor>* tensors :
       {&call.operands, &call.results, &call.scales}) {
    add(tensors->size());
    for (const Tensor& tensor : *tensors) {
      add(static_cast<uint64_t>(tensor.dtype));
      add(static_cast<uint64_t>(tensor.batch));
      add(static_cast<uint64_t>(tensor.rows));
      add(static_cast<uint64_t>(tensor.features));
    }
  }
  return hash;
}

std::string DescribeCall(const CallAttributes& at, const RankCall& call) {
  std::ostringstream text;
  text << at.label << ": " << OpName(at.op) << " by " << MethodName(at.method);
  if (at.variant != Variant::kPlain) text << ", " << VariantName(at.variant);
  if (!call.scales.empty()) text << kScalesPer << ScaledUnitOf(at, call);
  text << " of ";
  const auto list = [&](const std::vector<Tensor>& tensors) {
    for (size_t i = 0; i < tensors.size(); ++i) {
      text << (i == 0 ? "" : ", ") << Describe(tensors[i]);
    }
  };
  list(call.operands);
  text << " to ";
  list(call.results);
  const auto numbers = Numbers(at);
  for (size_t i = 0; i < numbers.size(); ++i) {
    if (numbers[i] != 0) text << ", " << kNumberNames[i] << ' ' << numbers[i];
  }
  if (at.scale != 1) text << ", scale " << at.scale;
  return text.str();
}

std::string_view ScaledUnitOf(const CallAttributes& at, const RankCall& call) {
  if (call.scales.empty()) return "";
  const bool has_blocks =
      std::any_of(call.scales.begin(), call.scales.end(),
                  [](const Tensor& scales) { return scales.dtype == DType::kE8M0; });
  return has_blocks ? "block" : at.has_row_scales ? "row" : "tensor";
}

std::string_view ScaledUnitIn(std::string_view description) {
  const size_t at = description.find(kScalesPer);
  if (at == std::string_view::npos) return "";
  description.remove_prefix(at + kScalesPer.size());
  return description.substr(0, description.find(' '));
}

std::string DescribeKernelOptions(const KernelOptions& kernel_options) {
  const KernelOptions usual;
  std::ostringstream text;
  const auto add = [&](const char* name, int value, int otherwise) {
    if (value != otherwise) text << ", " << name << ' ' << value;
  };
  add("use_ce", kernel_options.use_ce, usual.use_ce);
  add("num_sm", kernel_options.num_sm, usual.num_sm);
  add("cga_size", kernel_options.cga_size, usual.cga_size);
  add("sm_margin", kernel_options.sm_margin, usual.sm_margin);
  add("num_lanes", kernel_options.num_lanes, usual.num_lanes);
  add("allow_tf32", kernel_options.allow_tf32, usual.allow_tf32);
  add("transposes_fp8", kernel_options.transposes_fp8, usual.transposes_fp8);
  add("gemm_algorithm", kernel_options.gemm_algorithm, usual.gemm_algorithm);
  add("comm_priority", kernel_options.comm_priority, usual.comm_priority);
  add("gemm_priority", kernel_options.gemm_priority, usual.gemm_priority);
  return text.str();
}

std::string DescribeMismatch(const RankCall& left, const RankCall& right) {
  const auto compare = [](const char* what, const std::vector<Tensor>& a,
                          const std::vector<Tensor>& b) -> std::string {
    if (a.size() != b.size()) return std::string(what) + " counts differ";
    for (size_t i = 0; i < a.size(); ++i) {
      if (a[i].dtype != b[i].dtype || a[i].batch != b[i].batch ||
          a[i].rows != b[i].rows || a[i].features != b[i].features) {
        return std::string(what) + " " + std::to_string(i) + " is " + Describe(a[i]) +
               " and " + Describe(b[i]);
      }
    }
    return "";
  };
  std::string text = compare("operand", left.operands, right.operands);
  if (text.empty()) text = compare("result", left.results, right.results);
  if (text.empty()) text = compare("scales", left.scales, right.scales);
  return text;
}

}  // namespace jax_ub
