// Maps a call to the tensors that it communicates, and the chunks and splits of a
// schedule to rows of those tensors.
#pragma once

#include <cstdint>
#include <vector>

#include "engine/call.h"
#include "transport/transport.h"

namespace jax_ub {

// Rows [begin, end) of every batch element of a tensor, with the FP8 scales of these
// rows.
struct RowSlice {
  Tensor tensor;
  int64_t begin = 0;
  int64_t end = 0;
  Tensor scales = {};  // with the rows of `tensor`; null data: none

  int64_t num_rows() const { return end - begin; }
  int64_t row_bytes() const { return tensor.features * SizeOf(tensor.dtype); }
  // Returns the number of bytes in the slice, without the gaps between batch elements.
  int64_t size_bytes() const { return tensor.batch * num_rows() * row_bytes(); }
  // Returns the slice as strided memory: one contiguous block per batch element.
  Rows rows() const {
    return {tensor.At(0, begin), tensor.batch, num_rows() * row_bytes(),
            tensor.rows * row_bytes()};
  }

  bool has_scales() const { return scales.data != nullptr; }
  // Returns the byte offset of the scales in a slot (receive buffer). They follow the
  // rows, aligned for f32.
  int64_t scales_offset() const { return (size_bytes() + 3) / 4 * 4; }
  // Returns the scales of the slice as strided memory. Transport::Write stores them at
  // `scales_offset` in the peer's slot (receive buffer).
  Rows scale_rows() const {
    Rows rows = RowSlice{scales, begin, end}.rows();
    rows.slot_offset = scales_offset();
    return rows;
  }
};

// Returns a received slice of the same size as `like`. A peer has written the slice to
// `data`, a receive buffer: the rows of all batch elements without gaps, then the
// scales.
inline RowSlice PackedSlice(const RowSlice& like, const std::byte* data) {
  RowSlice packed = {like.tensor, 0, like.num_rows(), like.scales};
  packed.tensor.rows = packed.scales.rows = like.num_rows();
  packed.tensor.data = const_cast<std::byte*>(data);
  if (like.has_scales()) {
    packed.scales.data = packed.tensor.data + packed.scales_offset();
  }
  return packed;
}

// Returns the ascending indices of the operands that the call communicates. Returns no
// index if the op communicates partial sums of its GEMM instead.
std::vector<size_t> CommunicatedOperands(const CallAttributes& attributes,
                                         const RankCall& call);

// Returns the scales that the call sends together with operand `index`, or nullptr if
// it sends none. A call sends only scales per row or block, and only those of GEMM
// operands.
const Tensor* CommunicatedScales(const CallAttributes& attributes,
                                 const RankCall& call,
                                 size_t index);

// A tensor that the ranks gather or reduce: this rank's operand and its results.
struct CommunicatedTensor {
  // The shard of this rank in a gather, or its addend in a reduction. If the op reduces
  // partial sums of a GEMM, the first operand, from which the partial sums are
  // computed.
  Tensor operand;
  Tensor gathered;       // gathered copy; null data: not stored
  Tensor result;         // result of a reduction
  int64_t num_rows = 0;  // rows of all chunks together
  // Set only if rows with scales are gathered: the scales of the operand, and the array
  // that receives the gathered scales.
  Tensor scales = {};
  Tensor gathered_scales = {};
};

// Returns one entry per tensor that the call communicates. Only a weight gradient of
// several kernels, dw_i = x^T dy_i, communicates several tensors: it may all-gather
// each dy_i.
std::vector<CommunicatedTensor> CommunicatedTensorsOf(const CallAttributes& attributes,
                                                      const RankCall& call);

}  // namespace jax_ub
