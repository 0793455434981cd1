// Stores the e8m0 scales of FP8 operands as cuBLASLt reads them.
#pragma once

#include <cuda.h>

#include <cstdint>

#include "gemm/cuda/block_scales_params.h"
#include "platform/cuda/driver.h"
#include "platform/cuda/owners.h"

namespace jax_ub {

// The kernel of one device. The constructor loads it in the current context. Any thread
// may use it while this context is current.
class BlockScales {
 public:
  explicit BlockScales(const Driver& driver);

  // Returns the size in bytes of the stored scales of an operand [outer, k].
  static int64_t SizeBytes(int64_t outer, int64_t k);

  void Enqueue(CUstream stream, const BlockScalesParams& params) const;

 private:
  const Driver& driver_;
  Library library_;
  CUfunction kernel_ = nullptr;
};

}  // namespace jax_ub
