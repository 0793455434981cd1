// A device's streams: one for communication, some for products, and the events that order
// them. They belong to nobody's call; calls use them one after another.
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

class StreamLanes {
 public:
  // In the context that is current. `in_turn`: all lanes of products are one stream.
  StreamLanes(const Driver& driver,
              const KernelOptions& kernel_options,
              bool in_turn = false);

  int num_product_lanes() const { return num_product_lanes_; }
  CUstream stream(Lane lane) const {
    return streams_[std::min<size_t>(lane, streams_.size() - 1)].get();
  }

  // Event `index` of the call; each is made when it is first needed.
  CUevent event(int index);
  void ReserveEvents(int count) {
    if (count > 0) event(count - 1);
  }

  // Whether a capture has taken these streams along and has not ended yet.
  bool IsCapturing() const;

 private:
  const Driver& driver_;
  const int num_product_lanes_;
  std::vector<Stream> streams_;
  std::vector<Event> events_;
};

// All lanes of a device. A capture keeps the streams that it came across until it ends,
// so that other calls of that time need others.
class LanePool {
 public:
  explicit LanePool(const Driver& driver, bool in_turn = false)
      : driver_(driver), in_turn_(in_turn) {}

  // Free ones, with as many lanes and of such priorities as asked for. The caller sees to
  // it that one call enqueues at a time.
  StreamLanes& Find(const KernelOptions& kernel_options);

 private:
  using Key = std::tuple<int, int, int>;

  const Driver& driver_;
  const bool in_turn_;
  std::map<Key, std::deque<StreamLanes>> lanes_;
};

}  // namespace jax_ub
