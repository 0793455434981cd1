#include "engine/wgrad_builders.h"

#include <utility>
#include <vector>

#include "engine/segments.h"

namespace jax_ub {

namespace {

// Multiplies the sums of a weight gradient by the scales of x and dy_i, unless the
// scales multiply the elements (ScalesElements). All ranks have the same scale for the
// gathered operand, so it is read from rank 0.
void AddFactorsOfWgrad(const CallAttributes& at,
                       const std::vector<RankCall>& calls,
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
}

// Adds main_grad, the existing gradient to which a rank adds its dw_i, as an addend of
// the GEMM. The operands are x, then all dy_i, then all main_grads.
void AddMainGrads(const CallAttributes& at,
                  const std::vector<RankCall>& calls,
                  int i,
                  GemmProblem& problem) {
  if (!at.accumulate) return;
  const size_t index = 1 + at.num_kernels + i;
  AddendView addend{calls[0].operands[index].dtype, {}};
  for (const RankCall& call : calls) {
    const Tensor& main_grad = call.operands[index];
    addend.segments.push_back({main_grad.data, main_grad.features});
  }
  problem.addends.push_back(std::move(addend));
}

}  // namespace

// Builds the GEMM of dw_i for all local ranks at once: rank q computes dw[q] = x^T
// dy[q] over all tokens. Each rank has some of the tokens of x, which the GEMM reads in
// place. The segments along K, the tokens, are [batch][rank].
//
//          dy[0]   dy[1]   dy[2]   dy[3]      N
//   x^T  | dw[0] | dw[1] | dw[2] | dw[3] |
GemmProblem WgradGatherX(const CallAttributes& at, const RankCalls& calls, int i) {
  const Tensor& x = calls.local[0].operands[0];
  OperandSegments a(x.dtype);
  OperandSegments b(calls.local[0].operands[1 + i].dtype);
  ResultSegments dw(calls.local[0].results[i].dtype);
  a.AddOuter(x.features);
  dw.AddRows(x.features);
  for (int64_t batch = 0; batch < x.batch; ++batch) {
    for (const RankCall& call : calls.all) {
      const Tensor& shard = call.operands[0];
      a.AddInner(x.rows);
      b.AddInner(x.rows);
      a.Append(ColumnsOf(shard, batch, 0));
      a.AppendScales(at, ScalesOf(call, 0), shard, batch, 0, true);
    }
  }
  for (const RankCall& call : calls.local) {
    const Tensor& dy = call.operands[1 + i];
    b.AddOuter(dy.features);
    dw.AddColumns(dy.features);
    dw.Append(RowsOf(call.results[i], 0, 0));
    for (int64_t batch = 0; batch < x.batch; ++batch) {
      for (int p = 0; p < at.num_ranks; ++p) {
        b.Append(ColumnsOf(dy, batch, p * x.rows));
        b.AppendScales(at, ScalesOf(call, 1 + i), dy, batch, p * x.rows, true);
      }
    }
  }
  GemmProblem problem = Problem(at.scale, std::move(a), std::move(b), std::move(dw));
  AddFactorsOfWgrad(at, calls.local, i, problem);
  AddMainGrads(at, calls.local, i, problem);
  return problem;
}

// Builds the GEMM of dw_i for all local ranks at once: rank q computes dw[q] = x[q]^T
// dy over all tokens. Each rank has some of the tokens of dy, which the GEMM reads in
// place.
//
//            dy
//   x[0]^T | dw[0] |
//   x[1]^T | dw[1] |   K
//   x[2]^T | dw[2] |
//   x[3]^T | dw[3] |
GemmProblem WgradGatherDy(const CallAttributes& at, const RankCalls& calls, int i) {
  const Tensor& dy = calls.local[0].operands[1 + i];
  OperandSegments a(calls.local[0].operands[0].dtype);
  OperandSegments b(dy.dtype);
  ResultSegments dw(calls.local[0].results[i].dtype);
  b.AddOuter(dy.features);
  dw.AddColumns(dy.features);
  for (int64_t batch = 0; batch < dy.batch; ++batch) {
    for (const RankCall& call : calls.all) {
      const Tensor& shard = call.operands[1 + i];
      a.AddInner(dy.rows);
      b.AddInner(dy.rows);
      b.Append(ColumnsOf(shard, batch, 0));
      b.AppendScales(at, ScalesOf(call, 1 + i), shard, batch, 0, true);
    }
  }
  for (const RankCall& call : calls.local) {
    const Tensor& x = call.operands[0];
    a.AddOuter(x.features);
    dw.AddRows(x.features);
    dw.Append(RowsOf(call.results[i], 0, 0));
    for (int64_t batch = 0; batch < dy.batch; ++batch) {
      for (int p = 0; p < at.num_ranks; ++p) {
        a.Append(ColumnsOf(x, batch, p * dy.rows));
        a.AppendScales(at, ScalesOf(call, 0), x, batch, p * dy.rows, true);
      }
    }
  }
  GemmProblem problem = Problem(at.scale, std::move(a), std::move(b), std::move(dw));
  AddFactorsOfWgrad(at, calls.local, i, problem);
  AddMainGrads(at, calls.local, i, problem);
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
  AddFactorsOfWgrad(at, {call}, i, problem);
  AddMainGrads(at, {call}, i, problem);
  return problem;
}

}  // namespace jax_ub
