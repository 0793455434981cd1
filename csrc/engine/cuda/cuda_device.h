// What all devices that stand for a GPU have in common, and the memory of a call there.
#pragma once

#include <cuda.h>

#include <cstdint>
#include <vector>

#include "engine/device.h"

namespace jax_ub {

struct DeviceBytes {
  CUdeviceptr data = 0;
  int64_t size_bytes = 0;
};

// How a call divides its workspace: scratch of each lane's products, then the tensors in
// the order of their allocation.
struct WorkspacePlan {
  static constexpr int64_t kAlignment = 256;
  static constexpr int64_t Align(int64_t bytes) {
    return (bytes + kAlignment - 1) / kAlignment * kAlignment;
  }

  std::vector<int64_t> scratch_bytes;  // [lane]
  int64_t tensor_bytes = 0;
  int num_events = 0;

  // To be asked for: XLA may place it anywhere.
  int64_t size_bytes() const;
};

class CudaDevice : public Device {
 public:
  bool enqueues() const override { return true; }

  // That of x for a single product, whose rounding the sum over ranks hardly notices; f32
  // where several pairs are summed, or where nothing is sent.
  DType PartialDType(const CallAttributes& attributes,
                     const RankCall& call) const override;

  // A gather's pieces of a chunk would cost the products more than they hide.
  int DefaultSplits(CollectiveKind pattern) const override;
};

}  // namespace jax_ub
