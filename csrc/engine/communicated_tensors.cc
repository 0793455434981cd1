#include "engine/communicated_tensors.h"

namespace jax_ub {

namespace {

Tensor Gathered(const CallAttributes& at, Tensor shard) {
  shard.rows *= at.num_ranks;
  shard.data = nullptr;
  return shard;
}

}  // namespace

std::vector<size_t> CommunicatedOperands(const CallAttributes& at,
                                         const RankCall& call) {
  const OpInfo& info = InfoOf(at.op);
  switch (info.communicated) {
    case Communicated::kNothing:
    case Communicated::kPartialSum:
      break;
    case Communicated::kFirstOperand:
      return {0};
    case Communicated::kSeparateOperand:
      return {info.is_bulk() ? call.operands.size() - 1 : 0};
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

const Tensor* CommunicatedScales(const CallAttributes& at,
                                 const RankCall& call,
                                 size_t index) {
  const Communicated communicated = InfoOf(at.op).communicated;
  const bool is_factor = communicated == Communicated::kFirstOperand ||
                         communicated == Communicated::kSelectedOperand;
  return at.has_row_scales && is_factor ? &call.scales[index] : nullptr;
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
    const Tensor& operand = call.operands[index];
    if (IsGather(info.collective)) {
      const Tensor* scales = CommunicatedScales(at, call, index);
      Tensor gathered = Gathered(at, operand);
      CommunicatedTensor tensor = {operand, gathered, {}, gathered.rows};
      if (scales != nullptr) {
        tensor.scales = *scales;
        tensor.gathered_scales = Gathered(at, *scales);
      }
      if (is_returned) {
        const size_t index_of_result = call.results.size() - 1;
        if (scales != nullptr) {
          tensor.gathered_scales.data = call.results[index_of_result].data;
        }
        tensor.gathered.data = call.results[index_of_result - (scales != nullptr)].data;
      }
      tensors.push_back(tensor);
    } else {
      const Tensor& result = call.results.back();
      tensors.push_back({operand, result, result, operand.rows});
    }
  }
  return tensors;
}

}  // namespace jax_ub
