#include "engine/cuda/stream_lanes.h"

#include <algorithm>

namespace jax_ub {

bool IsCapturing(const Driver& driver, CUstream stream) {
  CUstreamCaptureStatus status = CU_STREAM_CAPTURE_STATUS_NONE;
  Check(driver, driver.StreamIsCapturing(stream, &status), "cuStreamIsCapturing");
  return status != CU_STREAM_CAPTURE_STATUS_NONE;
}

StreamLanes::StreamLanes(const Driver& driver,
                         const KernelOptions& kernel_options,
                         bool in_turn)
    : driver_(driver), num_product_lanes_(std::max(kernel_options.num_lanes, 1)) {
  int least = 0;
  int greatest = 0;
  Check(driver, driver.CtxGetStreamPriorityRange(&least, &greatest),
        "cuCtxGetStreamPriorityRange");
  const auto priority = [&](int asked, int otherwise) {
    return asked == 0 ? otherwise : std::clamp(asked, greatest, least);
  };
  streams_.emplace_back(driver, priority(kernel_options.comm_priority, greatest));
  for (int lane = 0; lane < (in_turn ? 1 : num_product_lanes_); ++lane) {
    streams_.emplace_back(driver, priority(kernel_options.gemm_priority, least));
  }
}

CUevent StreamLanes::event(int index) {
  while (static_cast<int>(events_.size()) <= index) events_.emplace_back(driver_);
  return events_[index].get();
}

StreamLanes& LanePool::Find(const KernelOptions& kernel_options) {
  std::deque<StreamLanes>& lanes =
      lanes_[{kernel_options.num_lanes, kernel_options.comm_priority,
              kernel_options.gemm_priority}];
  for (StreamLanes& one : lanes) {
    if (!IsCapturing(driver_, one.stream(kCommunicationLane))) return one;
  }
  return lanes.emplace_back(driver_, kernel_options, in_turn_);
}

}  // namespace jax_ub
