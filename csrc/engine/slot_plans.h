// What the slot-based methods plan once for a call site: it depends on shapes and on the
// method, not on addresses.
#pragma once

#include <memory>
#include <mutex>
#include <vector>

#include "engine/call.h"
#include "engine/device.h"
#include "schedule/schedule.h"

namespace jax_ub {

// The schedules of one call, each made when its rank first asks for it. Thread-safe.
class Schedules {
 public:
  // `first` is rank 0's.
  explicit Schedules(Schedule first);

  const Schedule& Of(int rank);

 private:
  std::mutex mutex_;
  std::vector<std::unique_ptr<const Schedule>> made_;  // [rank]; guarded by mutex_
};

// What a call needs of a communicator.
struct SlotRequirements {
  CollectiveKind pattern = CollectiveKind::kAllGather;
  Variant variant = Variant::kPlain;
  int num_splits = 1;
  int num_slots = 0;
  int64_t slot_bytes = 0;
  DType partial_dtype = DType::kF32;  // of sums of products that are sent
  std::shared_ptr<Schedules> schedules;
};

// Throws UnsupportedError when the op does not run by that method.
SlotRequirements ComputeSlotRequirements(const CallAttributes& attributes,
                                         const RankCall& call,
                                         const Device& device);

// Keeps the slot plan of a call site. Thread-safe: several launches may be in flight.
class SlotPlans {
 public:
  // The plan of a call of these shapes. `attributes` and what `device` answers are the
  // same in every call; the shapes are, too, in a program of XLA.
  SlotRequirements Find(const CallAttributes& attributes,
                        const RankCall& call,
                        const Device& device);

 private:
  std::mutex mutex_;       // guards the two below
  RankCall like_;          // shapes and dtypes that plan_ is for
  SlotRequirements plan_;  // without schedules: none yet
};

}  // namespace jax_ub
