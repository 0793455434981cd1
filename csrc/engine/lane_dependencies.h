// Orders the lanes of a device (the streams of a GPU) with events. A vector clock per
// lane detects waits that earlier waits imply, and these waits are omitted.
#pragma once

#include <algorithm>
#include <vector>

#include "engine/device.h"

namespace jax_ub {

// An event that a lane has recorded, as an index into LaneDependencies::dependencies_.
// With kNone, there is nothing to wait for.
struct Dependency {
  int index = kNone;
};

class LaneDependencies {
 public:
  explicit LaneDependencies(Device& device)
      : device_(device),
        known_(1 + device.num_product_lanes(),
               Clock(1 + device.num_product_lanes(), 0)) {}

  // Returns the lane (stream) for the next GEMM. The GEMM lanes take turns.
  Lane NextProduct() { return 1 + next_++ % device_.num_product_lanes(); }

  Dependency Record(Lane lane) {
    if (!device_.enqueues()) return {};
    ++known_[lane][lane];
    dependencies_.push_back({lane, device_.Record(lane), known_[lane]});
    return {static_cast<int>(dependencies_.size()) - 1};
  }

  void Await(Lane lane, Dependency dependency) {
    if (dependency.index == kNone) return;
    const Recorded& other = dependencies_[dependency.index];
    Clock& clock = known_[lane];
    if (clock[other.lane] >= other.clock[other.lane]) return;
    device_.Await(lane, other.event);
    for (size_t i = 0; i < clock.size(); ++i) {
      clock[i] = std::max(clock[i], other.clock[i]);
    }
  }

 private:
  // The vector clock of a point in a lane's queue: entry i is the number of events of
  // lane i that have occurred when the lane reaches this point.
  using Clock = std::vector<int>;
  struct Recorded {
    Lane lane;
    EventId event;
    Clock clock;
  };

  Device& device_;
  int next_ = 0;
  // Indexed by lane: the events that are known to occur before all further work on the
  // lane. The lane need not wait for them.
  std::vector<Clock> known_;
  std::vector<Recorded> dependencies_;
};

}  // namespace jax_ub
