#include "engine/communicated_tensors.h"

#include <utility>

#include "engine/segments.h"

namespace jax_ub {

namespace {

// An all-reduce views its operand as rows of one element, so that it can be split
// between any two elements.
Tensor AsRows(const CallAttributes& at, Tensor tensor) {
  if (at.op == Op::kAllReduce) {
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

CollectiveKind CollectiveKindOf(const CallAttributes& at) {
  switch (at.op) {
    case Op::kAllGatherMatmul:
      return CollectiveKind::kAllGatherMatmul;
    case Op::kMatmulReduceScatter:
      return CollectiveKind::kMatmulReduceScatter;
    case Op::kMatmulAllReduce:
      return CollectiveKind::kMatmulAllReduce;
    case Op::kReduceScatter:
    case Op::kBulkReduceScatter:
      return CollectiveKind::kReduceScatter;
    case Op::kAllReduce:
      return CollectiveKind::kAllReduce;
    case Op::kMatmul:
    case Op::kWgrad:
    case Op::kAllGather:
    case Op::kBulkAllGather:
      break;
  }
  return CollectiveKind::kAllGather;
}

bool IsBulk(Op op) { return op == Op::kBulkAllGather || op == Op::kBulkReduceScatter; }

std::vector<CommunicatedTensor> CommunicatedTensorsOf(const CallAttributes& at,
                                                      const RankCall& call) {
  const size_t n = at.num_kernels;
  std::vector<CommunicatedTensor> exchanges;
  const auto gather = [&](const Tensor& shard, std::byte* to) {
    CommunicatedTensor exchange{
        shard, Gathered(at, shard), {}, shard.rows * at.num_ranks};
    exchange.gathered.data = to;
    exchanges.push_back(exchange);
  };
  const auto reduce = [&](const Tensor& partial, const Tensor& result) {
    exchanges.push_back({partial, result, result, partial.rows});
  };
  switch (at.op) {
    case Op::kAllGatherMatmul:
      gather(call.operands[0], at.return_gathered ? call.results[n].data : nullptr);
      break;
    case Op::kAllGather:
      gather(call.operands[0], call.results[0].data);
      break;
    case Op::kBulkAllGather:
      gather(call.operands[2 * n], call.results[1].data);
      break;
    case Op::kWgrad:
      if (at.gather == Gather::kX) gather(call.operands[0], nullptr);
      if (at.gather == Gather::kDy) {
        for (size_t i = 0; i < n; ++i) gather(call.operands[1 + i], nullptr);
      }
      break;
    case Op::kMatmul:
    case Op::kMatmulReduceScatter:
    case Op::kMatmulAllReduce:
    case Op::kReduceScatter:
    case Op::kAllReduce:
      reduce(AsRows(at, call.operands[0]), AsRows(at, call.results[0]));
      break;
    case Op::kBulkReduceScatter:
      reduce(call.operands.back(), call.results.back());
      break;
  }
  return exchanges;
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
  for (const RowSlice& piece : x) num_rows += piece.num_rows();
  if (num_rows == 0) return problems;
  for (int i = 0; i < at.num_kernels; ++i) {
    GatherProduct product(at, call, i);
    int64_t next = row;
    for (const RowSlice& piece : x) {
      product.Add(piece, next);
      next += piece.num_rows();
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
