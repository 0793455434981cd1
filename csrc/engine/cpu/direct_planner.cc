#include "engine/cpu/direct_planner.h"

#include <utility>

#include "engine/communicated_tensors.h"

namespace jax_ub {

namespace {

// Adds the copies of an all-gather to `work`: tensor `index` of every rank is copied
// into result `result` of every local rank. `tensors` selects the operands or their
// scales.
void AddGather(const RankCalls& calls,
               std::vector<Tensor> RankCall::* tensors,
               size_t index,
               size_t result,
               WorkList& work) {
  const Tensor& shard = (calls.local[0].*tensors)[index];
  const int64_t size_bytes = shard.rows * shard.features * SizeOf(shard.dtype);
  for (const RankCall& to : calls.local) {
    for (int64_t b = 0; b < shard.batch; ++b) {
      for (size_t p = 0; p < calls.all.size(); ++p) {
        work.Add(Copy{(calls.all[p].*tensors)[index].At(b, 0),
                      to.results[result].At(b, static_cast<int64_t>(p) * shard.rows),
                      size_bytes});
      }
    }
  }
}

// Adds the sums of a reduce-scatter to `work`: rank r receives the sum over all ranks
// of block r of each batch element.
void AddScatter(const RankCalls& calls, size_t operand, size_t result, WorkList& work) {
  for (size_t i = 0; i < calls.local.size(); ++i) {
    const Tensor& to = calls.local[i].results[result];
    for (int64_t b = 0; b < to.batch; ++b) {
      Sum sum{{}, {{to.At(b, 0), to.features, to.dtype}}, to.rows, to.features};
      for (const RankCall& call : calls.all) {
        const Tensor& from = call.operands[operand];
        sum.parts.push_back(
            {from.At(b, calls.RankOf(i) * to.rows), from.features, from.dtype});
      }
      work.Add(sum);
    }
  }
}

// Adds the sum of an all-reduce to `work`. Bias and residual are equal on every rank,
// so the result is computed once and stored for all local ranks.
void AddReduceToAll(const CallAttributes& at, const RankCalls& calls, WorkList& work) {
  const Tensor& like = calls.local[0].results[0];
  Sum sum{{}, {}, like.rows, like.features};
  for (const RankCall& call : calls.all) {
    const Tensor& from = call.operands[0];
    sum.parts.push_back({from.data, from.features, from.dtype});
  }
  AddBiasAndResidual(at, calls.local[0], 0, 0, sum.parts);
  for (const RankCall& call : calls.local) {
    const Tensor& to = call.results[0];
    sum.to.push_back({to.data, to.features, to.dtype});
  }
  work.Add(sum);
}

// Adds the copies of a gather, or the sums of a reduction, to `work`. In
// all_gather_matmul, the copies fill the gathered result that the op returns. The GEMM
// does not read this result.
void AddCommunication(const CallAttributes& at,
                      const RankCalls& calls,
                      WorkList& work) {
  const CollectiveKind kind = InfoOf(at.op).collective;
  const size_t operand = CommunicatedOperands(at, calls.local[0])[0];
  size_t result = calls.local[0].results.size() - 1;
  if (IsGather(kind)) {
    if (CommunicatedScales(at, calls.local[0], operand) != nullptr) {
      AddGather(calls, &RankCall::scales, operand, result--, work);
    }
    return AddGather(calls, &RankCall::operands, operand, result, work);
  }
  if (IsAllReduce(kind)) return AddReduceToAll(at, calls, work);
  AddScatter(calls, operand, result, work);
}

void AddProducts(std::vector<GemmProblem> products,
                 const Workers& workers,
                 WorkList& work) {
  for (GemmProblem& product : products) work.Add(std::move(product), workers);
}

}  // namespace

WorkList PlanDirect(const CallAttributes& at,
                    const RankCalls& calls,
                    const Workers& workers) {
  const OpInfo& info = InfoOf(at.op);
  WorkList work;
  AddProducts(DirectProducts(at, calls), workers, work);
  if (info.communicated == Communicated::kSeparateOperand ||
      (info.communicated == Communicated::kFirstOperand && at.return_gathered)) {
    AddCommunication(at, calls, work);
  }
  return work;
}

WorkList PlanProducts(const CallAttributes& at,
                      const std::vector<RankCall>& calls,
                      const Workers& workers) {
  WorkList work;
  for (const RankCall& call : calls)
    AddProducts(LocalProducts(at, call), workers, work);
  return work;
}

WorkList PlanCommunication(const CallAttributes& at, const RankCalls& calls) {
  WorkList work;
  AddCommunication(at, calls, work);
  return work;
}

}  // namespace jax_ub
