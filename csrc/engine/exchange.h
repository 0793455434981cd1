// Where the pieces of a schedule lie in a rank's tensors.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "engine/call.h"
#include "schedule/schedule.h"
#include "transport/transport.h"

namespace jax_ub {

// A tensor of the executor's own, for what has no place in the call.
class OwnedTensor {
 public:
  OwnedTensor(DType dtype, int64_t batch, int64_t rows, int64_t features)
      : tensor_{dtype, batch, rows, features, nullptr} {
    memory_.reset(new std::byte[tensor_.size_bytes()]);
    tensor_.data = memory_.get();
  }
  const Tensor& tensor() const { return tensor_; }

 private:
  std::unique_ptr<std::byte[]> memory_;
  Tensor tensor_;
};

// Rows [begin, end) of every batch of a tensor.
struct Piece {
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
inline Piece PackedPiece(const Piece& like, const std::byte* data) {
  Tensor tensor = like.tensor;
  tensor.rows = like.num_rows();
  tensor.data = const_cast<std::byte*>(data);
  return {tensor, 0, tensor.rows};
}

}  // namespace jax_ub
