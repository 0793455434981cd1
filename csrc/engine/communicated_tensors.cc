#include "engine/communicated_tensors.h"

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

}  // namespace jax_ub
