// What a call communicates, and where the pieces of a schedule lie in a rank's tensors.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "engine/call.h"
#include "gemm/gemm.h"
#include "reduce/reduce.h"
#include "schedule/schedule.h"
#include "transport/transport.h"

namespace jax_ub {

// Rows [begin, end) of every batch of a tensor.
struct RowSlice {
  Tensor tensor;
  int64_t begin = 0;
  int64_t end = 0;

  int64_t num_rows() const { return end - begin; }
  int64_t row_bytes() const { return tensor.features * SizeOf(tensor.dtype); }
  // Of all batches, packed.
  int64_t size_bytes() const { return tensor.batch * num_rows() * row_bytes(); }
  // One block of contiguous bytes per batch.
  Rows rows() const {
    return {tensor.At(0, begin), tensor.batch, num_rows() * row_bytes(),
            tensor.rows * row_bytes()};
  }
};

// A packed piece, as a tensor of its own.
inline RowSlice PackedSlice(const RowSlice& like, const std::byte* data) {
  Tensor tensor = like.tensor;
  tensor.rows = like.num_rows();
  tensor.data = const_cast<std::byte*>(data);
  return {tensor, 0, tensor.rows};
}

CollectiveKind CollectiveKindOf(const CallAttributes& attributes);

bool IsBulk(Op op);

// The tensors of one pass of a schedule.
struct CommunicatedTensor {
  Tensor operand;        // the own shard; or what is summed, when there is no product
  Tensor gathered;       // where copies go; no data: nowhere
  Tensor result;         // where sums go
  int64_t num_rows = 0;  // that the chunks share
};

// One per tensor that is communicated: several only for the gradients of a wgrad.
std::vector<CommunicatedTensor> CommunicatedTensorsOf(const CallAttributes& attributes,
                                                      const RankCall& call);

// y_i[b, row + r] = scale * x[b, r] w_i + bias_i + residual_i[b, row + r] for the rows r
// of all pieces x, one behind the other, of every kernel; none for no rows.
std::vector<GemmProblem> GatherProducts(const CallAttributes& attributes,
                                        const RankCall& call,
                                        std::span<const RowSlice> x,
                                        int64_t row);

// Rows [begin, end) of the rank's partial sum over its pairs; none for no rows.
std::vector<GemmProblem> PartialProducts(const CallAttributes& attributes,
                                         const RankCall& call,
                                         const Tensor& partial,
                                         int64_t begin,
                                         int64_t end);

// Bias and residual of the rank behind the parts of a sum of its products, for rows from
// `row` of batch `b` on.
void AddBiasAndResidual(const CallAttributes& attributes,
                        const RankCall& call,
                        int64_t b,
                        int64_t row,
                        std::vector<ConstMatrix>& parts);

}  // namespace jax_ub
