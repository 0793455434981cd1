#include "engine/communicated_tensors.h"

#include <utility>

#include "engine/segments.h"

namespace jax_ub {

namespace {

// An all-reduce views its operand as rows of one element, so that it can be split
// between any two elements.
Tensor AsRows(const CallAttributes& at, Tensor tensor) {
  if (InfoOf(at.op).collective == CollectiveKind::kAllReduce) {
    tensor.rows = tensor.num_elements();
    tensor.batch = tensor.features = 1;
  }
  return tensor;
}

Tensor Gathered(const CallAttributes& at, Tensor shard) {
  shard.rows *= at.num_ranks;
  shard.data = nullptr;
  return shard;
}

}  // namespace

std::vector<size_t> CommunicatedOperands(const CallAttributes& at,
                                         const RankCall& call) {
  switch (InfoOf(at.op).communicated) {
    case Communicated::kNothing:
    case Communicated::kPartialSum:
      break;
    case Communicated::kFirstOperand:
      return {0};
    case Communicated::kSeparateOperand:
      return {call.operands.size() - 1};
    case Communicated::kSelectedOperand: {
      if (at.gather == Gather::kX) return {0};
      std::vector<size_t> dys;
      for (int i = 0; at.gather == Gather::kDy && i < at.num_kernels; ++i) {
        dys.push_back(1 + i);
      }
      return dys;
    }
  }
  return {};
}

std::vector<CommunicatedTensor> CommunicatedTensorsOf(const CallAttributes& at,
                                                      const RankCall& call) {
  const OpInfo& info = InfoOf(at.op);
  if (info.communicated == Communicated::kPartialSum) {
    const Tensor& result = call.results[0];
    return {{call.operands[0], result, result, call.operands[0].rows}};
  }
  const bool is_separate = info.communicated == Communicated::kSeparateOperand;
  const bool is_returned =
      is_separate ||
      (info.communicated == Communicated::kFirstOperand && at.return_gathered);
  std::vector<CommunicatedTensor> tensors;
  for (const size_t index : CommunicatedOperands(at, call)) {
    const Tensor operand = AsRows(at, call.operands[index]);
    if (IsGather(info.collective)) {
      Tensor gathered = Gathered(at, operand);
      gathered.data = is_returned ? call.results.back().data : nullptr;
      tensors.push_back({operand, gathered, {}, gathered.rows});
    } else {
      const Tensor result = AsRows(at, call.results.back());
      tensors.push_back({operand, result, result, operand.rows});
    }
  }
  return tensors;
}

namespace {

// Builds the GEMM of kernel i for GatherProducts. Its segments are ordered by slice,
// then by batch.
class GatherProduct {
 public:
  GatherProduct(const CallAttributes& at, const RankCall& call, int i)
      : at_(at),
        y_(call.results[i]),
        bias_(at.has_bias ? &call.operands[1 + at.num_kernels + i] : nullptr),
        residual_(at.has_residual ? &call.operands[FirstResidual(at) + i] : nullptr),
        a_(call.operands[0].dtype),
        w_(call.operands[0].dtype),
        c_(y_.dtype) {
    const Tensor& kernel = call.operands[1 + i];
    a_.AddInner(call.operands[0].features);
    c_.AddColumns(y_.features);
    w_.AddInner(call.operands[0].features);
    w_.AddOuter(y_.features);
    w_.Append(KernelOf(kernel, at.rhs_transposed));
  }

  void Add(const RowSlice& x, int64_t row) {
    for (int64_t b = 0; b < y_.batch; ++b) {
      a_.AddOuter(x.num_rows());
      a_.Append(RowsOf(x.tensor, b, x.begin));
      c_.AddRows(x.num_rows());
      c_.Append(RowsOf(y_, b, row));
      if (bias_) biases_.push_back({bias_->data, 0});
      if (residual_) residuals_.push_back({residual_->At(b, row), residual_->features});
    }
  }

  GemmProblem Take() {
    GemmProblem problem =
        Problem(at_.scale, std::move(a_), std::move(w_), std::move(c_));
    if (bias_) problem.addends.push_back({bias_->dtype, std::move(biases_)});
    if (residual_) {
      problem.addends.push_back({residual_->dtype, std::move(residuals_)});
    }
    return problem;
  }

 private:
  const CallAttributes& at_;
  const Tensor& y_;
  const Tensor* const bias_;
  const Tensor* const residual_;
  OperandSegments a_;
  OperandSegments w_;
  ResultSegments c_;
  std::vector<AddendSegment> biases_;
  std::vector<AddendSegment> residuals_;
};

}  // namespace

std::vector<GemmProblem> GatherProducts(const CallAttributes& at,
                                        const RankCall& call,
                                        std::span<const RowSlice> x,
                                        int64_t row) {
  std::vector<GemmProblem> problems;
  int64_t num_rows = 0;
  for (const RowSlice& slice : x) num_rows += slice.num_rows();
  if (num_rows == 0) return problems;
  for (int i = 0; i < at.num_kernels; ++i) {
    GatherProduct product(at, call, i);
    int64_t next = row;
    for (const RowSlice& slice : x) {
      product.Add(slice, next);
      next += slice.num_rows();
    }
    problems.push_back(product.Take());
  }
  return problems;
}

std::vector<GemmProblem> PartialProducts(const CallAttributes& at,
                                         const RankCall& call,
                                         const Tensor& partial,
                                         int64_t begin,
                                         int64_t end) {
  if (begin == end) return {};
  const int n = at.num_kernels;
  OperandSegments a(call.operands[0].dtype);
  OperandSegments w(call.operands[0].dtype);
  ResultSegments c(partial.dtype);
  w.AddOuter(partial.features);
  c.AddColumns(partial.features);
  for (int i = 0; i < n; ++i) {
    a.AddInner(call.operands[i].features);
    w.AddInner(call.operands[i].features);
    w.Append(KernelOf(call.operands[n + i], at.rhs_transposed));
  }
  for (int64_t b = 0; b < partial.batch; ++b) {
    a.AddOuter(end - begin);
    for (int i = 0; i < n; ++i) a.Append(RowsOf(call.operands[i], b, begin));
    c.AddRows(end - begin);
    c.Append(RowsOf(partial, b, begin));
  }
  return {Problem(at.scale, std::move(a), std::move(w), std::move(c))};
}

void AddBiasAndResidual(const CallAttributes& at,
                        const RankCall& call,
                        int64_t b,
                        int64_t row,
                        std::vector<ConstMatrix>& parts) {
  if (at.has_bias) {
    const Tensor& bias = call.operands[FirstResidual(at) - 1];
    parts.push_back({bias.data, 0, bias.dtype});
  }
  if (at.has_residual) {
    const Tensor& residual = call.operands[FirstResidual(at)];
    parts.push_back({residual.At(b, row), residual.features, residual.dtype});
  }
}

}  // namespace jax_ub
