// The lanes of a device: one stream for communication, some streams for GEMMs, and the
// events that order their work. Only one call at a time may use them.
#pragma once

#include <cuda.h>

#include <algorithm>
#include <cstddef>
#include <deque>
#include <map>
#include <tuple>
#include <vector>

#include "engine/call.h"
#include "engine/device.h"
#include "platform/cuda/driver.h"
#include "platform/cuda/owners.h"

namespace jax_ub {

// Returns whether the stream takes part in a graph capture that has not ended.
bool IsCapturing(const Driver& driver, CUstream stream);

class StreamLanes {
 public:
  // Creates the streams in the current context. If `in_turn` is true, all GEMM lanes
  // share one stream, so that GEMMs do not run concurrently.
  StreamLanes(const Driver& driver,
              const KernelOptions& kernel_options,
              bool in_turn = false);

  int num_product_lanes() const { return num_product_lanes_; }
  CUstream stream(Lane lane) const {
    return streams_[std::min<size_t>(lane, streams_.size() - 1)].get();
  }

  // Returns event number `index` of the current call. Creates the event at its first
  // use.
  CUevent event(int index);
  void ReserveEvents(int count) {
    if (count > 0) event(count - 1);
  }

 private:
  const Driver& driver_;
  const int num_product_lanes_;
  std::vector<Stream> streams_;
  std::vector<Event> events_;
};

// All lanes (streams) of a device, in sets (StreamLanes). Each call uses one set. A
// stream remains part of a graph capture until the capture ends. Until then, other
// calls need another set.
class LanePool {
 public:
  explicit LanePool(const Driver& driver, bool in_turn = false)
      : driver_(driver), in_turn_(in_turn) {}

  // Returns streams with the requested number and priorities. None of them is part of a
  // graph capture in progress. Only one call at a time may enqueue work.
  StreamLanes& Find(const KernelOptions& kernel_options);

 private:
  using Key = std::tuple<int, int, int>;

  const Driver& driver_;
  const bool in_turn_;
  std::map<Key, std::deque<StreamLanes>> lanes_;
};

}  // namespace jax_ub
