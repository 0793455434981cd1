// Maps a call to the tensors that it communicates, and the chunks and splits of a
// schedule to rows of those tensors.
#pragma once

#include <cstdint>
#include <vector>

#include "engine/call.h"
#include "transport/transport.h"

namespace jax_ub {

// Rows [begin, end) of every batch of a tensor, and their scales.
struct RowSlice {
  Tensor tensor;
  int64_t begin = 0;
  int64_t end = 0;
  Tensor scales = {};  // with the rows of `tensor`; null data: none

  int64_t num_rows() const { return end - begin; }
  int64_t row_bytes() const { return tensor.features * SizeOf(tensor.dtype); }
  // Returns the size of the slice over all batches, without the gaps between them.
  int64_t size_bytes() const { return tensor.batch * num_rows() * row_bytes(); }
  // Returns the slice as strided blocks: one contiguous block of bytes per batch.
  Rows rows() const {
    return {tensor.At(0, begin), tensor.batch, num_rows() * row_bytes(),
            tensor.rows * row_bytes()};
  }

  bool has_scales() const { return scales.data != nullptr; }
  // Returns where the scales begin in a slot that holds the slice: behind the rows,
  // aligned for f32.
  int64_t scales_offset() const { return (size_bytes() + 3) / 4 * 4; }
  // Returns the scales of the slice for Transport::Write, which stores them in the slot
  // at scales_offset().
  Rows scale_rows() const {
    Rows rows = RowSlice{scales, begin, end}.rows();
    rows.slot_offset = scales_offset();
    return rows;
  }
};

// Returns a slice of the shape of `like` whose batches are stored contiguously at
// `data`, as they are in a slot, with the scales behind them.
inline RowSlice PackedSlice(const RowSlice& like, const std::byte* data) {
  RowSlice packed = {like.tensor, 0, like.num_rows(), like.scales};
  packed.tensor.rows = packed.scales.rows = like.num_rows();
  packed.tensor.data = const_cast<std::byte*>(data);
  if (like.has_scales()) {
    packed.scales.data = packed.tensor.data + packed.scales_offset();
  }
  return packed;
}

// Returns the indices of the operands that are communicated, ascending. An op that
// sends partial sums of its GEMM has none.
std::vector<size_t> CommunicatedOperands(const CallAttributes& attributes,
                                         const RankCall& call);

// Returns the scales that are sent with operand `index`, or nullptr.
const Tensor* CommunicatedScales(const CallAttributes& attributes,
                                 const RankCall& call,
                                 size_t index);

// A tensor that is communicated by one pass of a schedule.
struct CommunicatedTensor {
  // For a gather: this rank's shard. For a reduction: this rank's addend, if the op has
  // no GEMM.
  Tensor operand;
  Tensor gathered;       // gathered copy; null data: not stored
  Tensor result;         // result of a reduction
  int64_t num_rows = 0;  // rows of all chunks together
  // For a gather: the scales of the operand's rows and of the gathered rows.
  // scales.data is null if rows have no scales.
  Tensor scales = {};
  Tensor gathered_scales = {};
};

// Returns one entry per communicated tensor. Only the weight gradient with gathered
// `dy` has several, one per `dy_i`.
std::vector<CommunicatedTensor> CommunicatedTensorsOf(const CallAttributes& attributes,
                                                      const RankCall& call);

}  // namespace jax_ub
