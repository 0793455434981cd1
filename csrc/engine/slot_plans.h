// Slot plans: the slots and the schedules that a call needs. They depend on shapes and
// on the method, not on addresses, so they are computed once per call site.
#pragma once

#include <memory>
#include <mutex>
#include <vector>

#include "engine/call.h"
#include "engine/device.h"
#include "schedule/schedule.h"

namespace jax_ub {

// The schedules of a call, one per rank, each built at its first use. Thread-safe.
class Schedules {
 public:
  // Stores `first`, the schedule of rank 0. The other ranks' schedules are built later.
  explicit Schedules(Schedule first);

  const Schedule& Of(int rank);

 private:
  std::mutex mutex_;
  std::vector<std::unique_ptr<const Schedule>> schedules_;  // [rank]; guarded by mutex_
};

// The slots that a call needs from a communicator, and how it uses them.
struct SlotRequirements {
  CollectiveKind collective = CollectiveKind::kAllGather;
  Variant variant = Variant::kPlain;
  int num_splits = 1;
  int num_slots = 0;
  int64_t slot_bytes = 0;
  DType partial_dtype = DType::kF32;  // of partial sums of the GEMM that are sent
  std::shared_ptr<Schedules> schedules;
};

// Computes the slot plan of a call. Throws UnsupportedError if the op does not support
// the method.
SlotRequirements ComputeSlotRequirements(const CallAttributes& attributes,
                                         const RankCall& call,
                                         const Device& device);

// Caches the slot plan of a call site. Thread-safe: several launches may be in flight.
class SlotPlans {
 public:
  // Returns the slot plan for the shapes of `call`. Computes it again only if they
  // differ from the shapes of the previous call, which does not happen within one XLA
  // program. `attributes` and the properties of `device` must be the same in every
  // call.
  SlotRequirements Find(const CallAttributes& attributes,
                        const RankCall& call,
                        const Device& device);

 private:
  std::mutex mutex_;       // guards `shapes_` and `plan_`
  RankCall shapes_;        // shapes and dtypes for which `plan_` was computed
  SlotRequirements plan_;  // null schedules: not computed yet
};

}  // namespace jax_ub
