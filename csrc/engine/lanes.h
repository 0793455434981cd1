// Orders the lanes of a device, and leaves out every wait that others imply.
#pragma once

#include <algorithm>
#include <vector>

#include "engine/device.h"

namespace jax_ub {

// A point of a lane; none where there is nothing to await.
struct Point {
  int index = kNone;
};

class Lanes {
 public:
  explicit Lanes(Device& device)
      : device_(device),
        known_(1 + device.num_product_lanes(),
               Clock(1 + device.num_product_lanes(), 0)) {}

  // Product lanes in turn.
  Lane NextProduct() { return 1 + next_++ % device_.num_product_lanes(); }

  Point Record(Lane lane) {
    if (!device_.enqueues()) return {};
    ++known_[lane][lane];
    points_.push_back({lane, device_.Record(lane), known_[lane]});
    return {static_cast<int>(points_.size()) - 1};
  }

  void Await(Lane lane, Point point) {
    if (point.index == kNone) return;
    const Recorded& other = points_[point.index];
    Clock& clock = known_[lane];
    if (clock[other.lane] >= other.clock[other.lane]) return;
    device_.Await(lane, other.mark);
    for (size_t i = 0; i < clock.size(); ++i) {
      clock[i] = std::max(clock[i], other.clock[i]);
    }
  }

 private:
  // [lane]: up to which of its points everything is done before.
  using Clock = std::vector<int>;
  struct Recorded {
    Lane lane;
    Mark mark;
    Clock clock;
  };

  Device& device_;
  int next_ = 0;
  std::vector<Clock> known_;  // [lane]: before what it is given next
  std::vector<Recorded> points_;
};

}  // namespace jax_ub
