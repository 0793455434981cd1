// Maps a call to the tensors that it communicates, and the chunks and splits of a
// schedule to rows of those tensors.
#pragma once

#include <cstdint>
#include <vector>

#include "engine/call.h"
#include "transport/transport.h"

namespace jax_ub {

// Rows [begin, end) of every batch of a tensor.
struct RowSlice {
  Tensor tensor;
  int64_t begin = 0;
  int64_t end = 0;

  int64_t num_rows() const { return end - begin; }
  int64_t row_bytes() const { return tensor.features * SizeOf(tensor.dtype); }
  // Returns the size of the slice over all batches, without the gaps between them.
  int64_t size_bytes() const { return tensor.batch * num_rows() * row_bytes(); }
  // Returns the slice as strided blocks: one contiguous block of bytes per batch.
  Rows rows() const {
    return {tensor.At(0, begin), tensor.batch, num_rows() * row_bytes(),
            tensor.rows * row_bytes()};
  }
};

// Returns a slice of the shape of `like` whose batches are stored contiguously at
// `data`, as they are in a slot.
inline RowSlice PackedSlice(const RowSlice& like, const std::byte* data) {
  Tensor tensor = like.tensor;
  tensor.rows = like.num_rows();
  tensor.data = const_cast<std::byte*>(data);
  return {tensor, 0, tensor.rows};
}

// Returns the indices of the operands that are communicated, ascending. An op that
// sends partial sums of its GEMM has none.
std::vector<size_t> CommunicatedOperands(const CallAttributes& attributes,
                                         const RankCall& call);

// A tensor that is communicated by one pass of a schedule.
struct CommunicatedTensor {
  // For a gather: this rank's shard. For a reduction: this rank's addend, if the op has
  // no GEMM.
  Tensor operand;
  Tensor gathered;       // gathered copy; null data: not stored
  Tensor result;         // result of a reduction
  int64_t num_rows = 0;  // rows of all chunks together
};

// Returns one entry per communicated tensor. Only the weight gradient with gathered
// `dy` has several, one per `dy_i`.
std::vector<CommunicatedTensor> CommunicatedTensorsOf(const CallAttributes& attributes,
                                                      const RankCall& call);

}  // namespace jax_ub
