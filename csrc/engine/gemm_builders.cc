#include "engine/gemm_builders.h"

#include <utility>

namespace jax_ub {

namespace {

using Calls = std::vector<RankCall>;

// Multiplies the sums of a GEMM by the FP8 scales of x_i and w_i. The GEMM sums x_i w_i
// over the operand pairs i of all calls. Its segments along K are indexed [call][pair].
// The scales of several pairs may differ. Without row scales, all ranks have the same
// scales, so a single pair has one factor for all segments. first_row(i) returns the row
// of x, counted through all batch elements, at which row segment i of the result begins.
template <typename FirstRow>
void AddFactorsOfPairs(const CallAttributes& at,
                       const Calls& calls,
                       bool contracts_rows_of_w,
                       const FirstRow& first_row,
                       GemmProblem& problem) {
  const int n = at.num_kernels;
  const bool may_differ = at.has_row_scales || n > 1;
  const int num_parts = may_differ ? static_cast<int>(calls.size()) * n : 1;
  AddFactors(
      at, num_parts,
      [&](int part, size_t i) {
        return FactorOf(at, calls[part / n].scales[part % n], first_row(i), false,
                        /*is_of_rows=*/true);
      },
      [&](int part, size_t) {
        return FactorOf(at, calls[part / n].scales[n + part % n], 0,
                        contracts_rows_of_w, /*is_of_rows=*/false);
      },
      problem);
}

// Returns operand `index` of all ranks as an addend of a GEMM. Each rank's rows (of all
// batch elements together) are divided into `num_parts` equal parts. The addend has one
// segment per part and rank: part 0 of every rank, then part 1, and so on.
AddendView AddendOf(const Calls& calls, size_t index, int64_t num_parts = 1) {
  AddendView addend{calls[0].operands[index].dtype, {}};
  for (int64_t part = 0; part < num_parts; ++part) {
    for (const RankCall& call : calls) {
      const Tensor& tensor = call.operands[index];
      const int64_t row = part * tensor.batch * tensor.rows / num_parts;
      addend.segments.push_back({tensor.At(0, row), tensor.features});
    }
  }
  return addend;
}

// Returns the bias vectors of all ranks, which are operand `index` of the calls, as an
// addend of the GEMM. The addend has one segment per rank and part, like the result of
// AddendOf. Its row stride is 0, so that the GEMM adds the vector to every row.
AddendView BiasOf(const Calls& calls, size_t index, int64_t num_parts = 1) {
  AddendView bias{calls[0].operands[index].dtype, {}};
  for (int64_t part = 0; part < num_parts; ++part) {
    for (const RankCall& call : calls) {
      bias.segments.push_back({call.operands[index].data, 0});
    }
  }
  return bias;
}

// Builds the GEMM y_i = x w_i for all local ranks at once. Its rows are the shards of x
// of all ranks. Its columns are those of the local ranks' kernels. For P = 4 ranks, m
// rows per shard and one batch element:
//
//               w[0]   w[1]   w[2]   w[3]      N
//   x[0]   m  | y[0] | y[1] | y[2] | y[3] |
//   x[1]   m  |  |   |  |   |  |   |  |   |
//   x[2]   m  |  |   |  |   |  |   |  |   |    each y[q] is one block of 4 m rows
//   x[3]   m  |  v   |  v   |  v   |  v   |
//
// If each row of x has its own scale, each x[p] is a row segment of the result.
GemmProblem AllGatherMatmul(const CallAttributes& at, const RankCalls& calls, int i) {
  const Calls& local = calls.local;
  const Tensor& x = local[0].operands[0];
  OperandSegments a(x.dtype);
  a.AddInner(x.features);
  for (int64_t b = 0; b < x.batch; ++b) {
    for (const RankCall& call : calls.all) {
      const Tensor& shard = call.operands[0];
      a.AddOuter(x.rows);
      a.Append(RowsOf(shard, b, 0));
      a.AppendScales(at, ScalesOf(call, 0), shard, b, 0, false);
    }
  }
  OperandSegments w(local[0].operands[1 + i].dtype);
  ResultSegments y(local[0].results[i].dtype);
  w.AddInner(x.features);
  for (const RankCall& call : local) {
    const Tensor& kernel = call.operands[1 + i];
    const int64_t out = call.results[i].features;
    w.AddOuter(out);
    w.Append(KernelOf(kernel, at.rhs_transposed));
    w.AppendScales(at, ScalesOf(call, 1 + i), kernel, 0, 0, !at.rhs_transposed);
    y.AddColumns(out);
  }
  const bool is_split =
      at.has_row_scales && !ScalesElements(at, local[0].scales[0], false);
  const int64_t num_parts = is_split ? x.batch * at.num_ranks : 1;
  const int64_t part_rows = x.batch * x.rows * at.num_ranks / num_parts;
  for (int64_t part = 0; part < num_parts; ++part) {
    y.AddRows(part_rows);
    for (const RankCall& call : local) {
      y.Append(RowsOf(call.results[i], 0, part * part_rows));
    }
  }
  GemmProblem problem = Problem(at.scale, std::move(a), std::move(w), std::move(y));
  AddFactors(
      at, 1,
      [&](int, size_t part) {
        const RankCall& call = is_split ? calls.all[part % at.num_ranks] : local[0];
        const int64_t batch = static_cast<int64_t>(part) / at.num_ranks;
        return FactorOf(at, call.scales[0], batch * x.rows, false, true);
      },
      [&](int, size_t rank) {
        return FactorOf(at, local[rank].scales[1 + i], 0, !at.rhs_transposed, false);
      },
      problem);
  if (at.has_bias) {
    problem.addends.push_back(BiasOf(local, 1 + at.num_kernels + i, num_parts));
  }
  if (at.has_residual) {
    problem.addends.push_back(AddendOf(local, FirstResidual(at) + i, num_parts));
  }
  return problem;
}

// Adds the bias and the residual of each rank to the part of the result that the rank
// receives. In a reduce-scatter, this part has one segment per batch element. In an
// all-reduce, it is a copy of the whole result.
void AddBiasesAndResiduals(const CallAttributes& at,
                           const Calls& calls,
                           GemmProblem& problem) {
  const size_t residual_at = FirstResidual(at);
  const bool scattered =
      InfoOf(at.op).collective == CollectiveKind::kMatmulReduceScatter;
  const int64_t batch = scattered ? calls[0].results[0].batch : 1;
  if (at.has_bias) problem.addends.push_back(BiasOf(calls, residual_at - 1, batch));
  if (at.has_residual) problem.addends.push_back(AddendOf(calls, residual_at, batch));
}

// Builds the GEMM of a reduce-scatter: y = sum of x_i w_i over operand pairs and ranks.
// Its row segments are [batch][rank], because each rank receives one segment of every
// batch element.
GemmProblem MatmulReduceScatter(const CallAttributes& at, const Calls& calls) {
  const Tensor& first = calls[0].results[0];
  ResultSegments y(first.dtype);
  y.AddColumns(first.features);
  for (int64_t b = 0; b < first.batch; ++b) {
    for (const RankCall& call : calls) {
      y.AddRows(first.rows);
      y.Append(RowsOf(call.results[0], b, 0));
    }
  }
  GemmProblem problem = PartialProduct(at, calls, std::move(y));
  AddBiasesAndResiduals(at, calls, problem);
  return problem;
}

// Builds the GEMM of an all-reduce: y = sum of x_i w_i over operand pairs and ranks.
// The GEMM computes each row once, and stores it in the results of all ranks in
// `calls`. With a single call, it sums over the operand pairs of one rank.
GemmProblem MatmulAllReduce(const CallAttributes& at, const Calls& calls) {
  const Tensor& first = calls[0].results[0];
  ResultSegments y(first.dtype, static_cast<int>(calls.size()));
  y.AddRows(first.batch * first.rows);
  y.AddColumns(first.features);
  for (const RankCall& call : calls) y.Append(RowsOf(call.results[0], 0, 0));
  GemmProblem problem = PartialProduct(at, calls, std::move(y));
  AddBiasesAndResiduals(at, calls, problem);
  return problem;
}

// Multiplies the sums of a weight gradient by the scales of x and dy_i, unless the
// scales multiply the elements (ScalesElements). Adds main_grad_i, the existing
// gradient. The operands are x, then all dy_i, then all main_grad_i. The scale of a
// gathered operand is equal on all ranks, so it is read from calls[0].
void AddFactorsAndMainGrads(const CallAttributes& at,
                            const Calls& calls,
                            int i,
                            GemmProblem& problem) {
  AddFactors(
      at, 1,
      [&](int, size_t row) {
        const size_t rank = at.gather == Gather::kDy ? row : 0;
        return FactorOf(at, calls[rank].scales[0], 0, true, true);
      },
      [&](int, size_t column) {
        const size_t rank = at.gather == Gather::kX ? column : 0;
        return FactorOf(at, calls[rank].scales[1 + i], 0, true, false);
      },
      problem);
  if (at.accumulate) {
    problem.addends.push_back(AddendOf(calls, 1 + at.num_kernels + i));
  }
}

// Builds the GEMM of dw_i for all local ranks at once, where x or dy_i is gathered: the
// GEMM reads the shards of all ranks in place. Rank q computes dw[q] = x^T dy[q] or
// dw[q] = x[q]^T dy. The segments along K, the tokens, are [batch][rank].
//
//          dy[0]   dy[1]   dy[2]   dy[3]      N                 dy
//   x^T  | dw[0] | dw[1] | dw[2] | dw[3] |           x[0]^T | dw[0] |
//                                                    x[1]^T | dw[1] |
//                                                    x[2]^T | dw[2] |   K
//                                                    x[3]^T | dw[3] |
GemmProblem WgradOfGathered(const CallAttributes& at, const RankCalls& calls, int i) {
  const bool gathers_x = at.gather == Gather::kX;
  const size_t gathered_index = gathers_x ? 0 : 1 + i;
  const size_t own_index = gathers_x ? 1 + i : 0;
  const Tensor& like = calls.local[0].operands[gathered_index];
  OperandSegments gathered(like.dtype);
  OperandSegments own(calls.local[0].operands[own_index].dtype);
  ResultSegments dw(calls.local[0].results[i].dtype);
  gathered.AddOuter(like.features);
  for (int64_t batch = 0; batch < like.batch; ++batch) {
    for (const RankCall& call : calls.all) {
      const Tensor& shard = call.operands[gathered_index];
      gathered.AddInner(like.rows);
      own.AddInner(like.rows);
      gathered.Append(ColumnsOf(shard, batch, 0));
      gathered.AppendScales(at, ScalesOf(call, gathered_index), shard, batch, 0, true);
    }
  }
  for (const RankCall& call : calls.local) {
    const Tensor& whole = call.operands[own_index];
    own.AddOuter(whole.features);
    dw.Append(RowsOf(call.results[i], 0, 0));
    for (int64_t batch = 0; batch < like.batch; ++batch) {
      for (int p = 0; p < at.num_ranks; ++p) {
        const int64_t row = p * like.rows;
        own.Append(ColumnsOf(whole, batch, row));
        own.AppendScales(at, ScalesOf(call, own_index), whole, batch, row, true);
      }
    }
    gathers_x ? dw.AddColumns(whole.features) : dw.AddRows(whole.features);
  }
  gathers_x ? dw.AddRows(like.features) : dw.AddColumns(like.features);
  GemmProblem problem =
      gathers_x ? Problem(at.scale, std::move(gathered), std::move(own), std::move(dw))
                : Problem(at.scale, std::move(own), std::move(gathered), std::move(dw));
  AddFactorsAndMainGrads(at, calls.local, i, problem);
  return problem;
}

// Builds the GEMM dw_i = x^T dy_i of one rank, without communication.
GemmProblem Wgrad(const CallAttributes& at, const RankCall& call, int i) {
  const Tensor& x = call.operands[0];
  const Tensor& dy = call.operands[1 + i];
  OperandSegments a(x.dtype);
  OperandSegments b(dy.dtype);
  ResultSegments dw(call.results[i].dtype);
  a.AddOuter(x.features);
  a.AddInner(x.batch * x.rows);
  a.Append(ColumnsOf(x, 0, 0));
  a.AppendScales(at, ScalesOf(call, 0), x, 0, 0, true);
  b.AddOuter(dy.features);
  b.AddInner(x.batch * x.rows);
  b.Append(ColumnsOf(dy, 0, 0));
  b.AppendScales(at, ScalesOf(call, 1 + i), dy, 0, 0, true);
  dw.AddRows(x.features);
  dw.AddColumns(dy.features);
  dw.Append(RowsOf(call.results[i], 0, 0));
  GemmProblem problem = Problem(at.scale, std::move(a), std::move(b), std::move(dw));
  AddFactorsAndMainGrads(at, {call}, i, problem);
  return problem;
}

}  // namespace

std::vector<GemmProblem> LocalProducts(const CallAttributes& at, const RankCall& call) {
  std::vector<GemmProblem> products;
  switch (InfoOf(at.op).gemm) {
    case GemmKind::kNone:
    case GemmKind::kGatheredRows:
      break;
    case GemmKind::kPairSum:
    case GemmKind::kDgrad:
      products.push_back(MatmulAllReduce(at, {call}));
      break;
    case GemmKind::kWgrad:
      for (int i = 0; i < at.num_kernels; ++i) products.push_back(Wgrad(at, call, i));
      break;
  }
  return products;
}

std::vector<GemmProblem> DirectProducts(const CallAttributes& at,
                                        const RankCalls& calls) {
  const OpInfo& info = InfoOf(at.op);
  const bool gathers = at.gather != Gather::kNone;
  std::vector<GemmProblem> products;
  if (info.communicated == Communicated::kPartialSum) {
    products.push_back(IsAllReduce(info.collective)
                           ? MatmulAllReduce(at, calls.local)
                           : MatmulReduceScatter(at, calls.local));
  } else if (info.communicated == Communicated::kFirstOperand) {
    for (int i = 0; i < at.num_kernels; ++i) {
      products.push_back(AllGatherMatmul(at, calls, i));
    }
  } else if (info.communicated == Communicated::kSelectedOperand && gathers) {
    for (int i = 0; i < at.num_kernels; ++i) {
      products.push_back(WgradOfGathered(at, calls, i));
    }
  } else {
    for (const RankCall& call : calls.local) {
      for (GemmProblem& product : LocalProducts(at, call)) {
        products.push_back(std::move(product));
      }
    }
  }
  return products;
}

// The contracted dimension K concatenates the operand pairs of all ranks. For P = 2
// ranks with two pairs each, K is:
//
//   | x_0[0] w_0[0] | x_1[0] w_1[0] | x_0[1] w_0[1] | x_1[1] w_1[1] |
GemmProblem PartialProduct(const CallAttributes& at,
                           const Calls& calls,
                           ResultSegments to) {
  const int n = at.num_kernels;
  const bool is_transposed = HasTransposedKernels(at);
  const Tensor& x = calls[0].operands[0];
  OperandSegments a(x.dtype);
  OperandSegments w(calls[0].operands[n].dtype);
  a.AddOuter(x.batch * x.rows);
  w.AddOuter(calls[0].results[0].features);
  for (const RankCall& call : calls) {
    for (int i = 0; i < n; ++i) {
      const Tensor& kernel = call.operands[n + i];
      a.AddInner(call.operands[i].features);
      w.AddInner(call.operands[i].features);
      a.Append(RowsOf(call.operands[i], 0, 0));
      a.AppendScales(at, ScalesOf(call, i), call.operands[i], 0, 0, false);
      w.Append(KernelOf(kernel, is_transposed));
      w.AppendScales(at, ScalesOf(call, n + i), kernel, 0, 0, !is_transposed);
    }
  }
  GemmProblem problem = Problem(at.scale, std::move(a), std::move(w), std::move(to));
  const std::vector<int64_t>& rows = problem.c.row_bounds;
  AddFactorsOfPairs(
      at, calls, !is_transposed, [&](size_t i) { return rows[i]; }, problem);
  return problem;
}

namespace {

// Builds the GEMM y_i = x w_i of one kernel from slices of x. Each call of Add appends
// the rows of one slice, with one segment per batch element.
class GatherProduct {
 public:
  GatherProduct(const CallAttributes& at, const RankCall& call, int i)
      : at_(at),
        call_(call),
        kernel_(i),
        y_(call.results[i]),
        bias_(at.has_bias ? &call.operands[1 + at.num_kernels + i] : nullptr),
        residual_(at.has_residual ? &call.operands[FirstResidual(at) + i] : nullptr),
        a_(call.operands[0].dtype),
        w_(call.operands[1 + i].dtype),
        c_(y_.dtype) {
    const Tensor& kernel = call.operands[1 + i];
    a_.AddInner(call.operands[0].features);
    c_.AddColumns(y_.features);
    w_.AddInner(call.operands[0].features);
    w_.AddOuter(y_.features);
    w_.Append(KernelOf(kernel, at.rhs_transposed));
    w_.AppendScales(at, ScalesOf(call, 1 + i), kernel, 0, 0, !at.rhs_transposed);
  }

  void Add(const RowSlice& x, int64_t row) {
    const Tensor* scales = x.has_scales() ? &x.scales : ScalesOf(call_, 0);
    for (int64_t b = 0; b < y_.batch; ++b) {
      a_.AddOuter(x.num_rows());
      a_.Append(RowsOf(x.tensor, b, x.begin));
      a_.AppendScales(at_, scales, x.tensor, b, x.begin, false);
      if (scales) {
        const int64_t first = b * x.tensor.rows + x.begin;
        factors_.push_back(FactorOf(at_, *scales, first, false, /*is_of_rows=*/true));
      }
      c_.AddRows(x.num_rows());
      c_.Append(RowsOf(y_, b, row));
      if (bias_) biases_.push_back({bias_->data, 0});
      if (residual_) residuals_.push_back({residual_->At(b, row), residual_->features});
    }
  }

  GemmProblem Take() {
    GemmProblem problem =
        Problem(at_.scale, std::move(a_), std::move(w_), std::move(c_));
    AddFactors(
        at_, 1, [&](int, size_t i) { return factors_[i]; },
        [&](int, size_t) {
          return FactorOf(at_, call_.scales[1 + kernel_], 0, !at_.rhs_transposed,
                          /*is_of_rows=*/false);
        },
        problem);
    if (bias_) problem.addends.push_back({bias_->dtype, std::move(biases_)});
    if (residual_) {
      problem.addends.push_back({residual_->dtype, std::move(residuals_)});
    }
    return problem;
  }

 private:
  const CallAttributes& at_;
  const RankCall& call_;
  const int kernel_;
  const Tensor& y_;
  const Tensor* const bias_;
  const Tensor* const residual_;
  OperandSegments a_;
  OperandSegments w_;
  ResultSegments c_;
  std::vector<FactorSegment> factors_;
  std::vector<AddendSegment> biases_;
  std::vector<AddendSegment> residuals_;
};

}  // namespace

std::vector<GemmProblem> GatherProducts(const CallAttributes& at,
                                        const RankCall& call,
                                        std::span<const RowSlice> slices,
                                        int64_t row) {
  std::vector<GemmProblem> problems;
  int64_t num_rows = 0;
  for (const RowSlice& slice : slices) num_rows += slice.num_rows();
  if (num_rows == 0) return problems;
  for (int i = 0; i < at.num_kernels; ++i) {
    GatherProduct product(at, call, i);
    int64_t next = row;
    for (const RowSlice& slice : slices) {
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
  OperandSegments w(call.operands[n].dtype);
  ResultSegments c(partial.dtype);
  w.AddOuter(partial.features);
  c.AddColumns(partial.features);
  for (int i = 0; i < n; ++i) {
    const Tensor& kernel = call.operands[n + i];
    a.AddInner(call.operands[i].features);
    w.AddInner(call.operands[i].features);
    w.Append(KernelOf(kernel, at.rhs_transposed));
    w.AppendScales(at, ScalesOf(call, n + i), kernel, 0, 0, !at.rhs_transposed);
  }
  for (int64_t b = 0; b < partial.batch; ++b) {
    a.AddOuter(end - begin);
    for (int i = 0; i < n; ++i) {
      a.Append(RowsOf(call.operands[i], b, begin));
      a.AppendScales(at, ScalesOf(call, i), call.operands[i], b, begin, false);
    }
    c.AddRows(end - begin);
    c.Append(RowsOf(partial, b, begin));
  }
  GemmProblem problem = Problem(at.scale, std::move(a), std::move(w), std::move(c));
  AddFactorsOfPairs(
      at, {call}, !at.rhs_transposed,
      [&](size_t b) { return static_cast<int64_t>(b) * partial.rows + begin; },
      problem);
  return {std::move(problem)};
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
