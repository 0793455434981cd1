// Slot plans: the slots (receive buffers) and the schedules that a call needs. A plan
// depends on shapes and on the method, not on addresses, so it is computed once per
// call site.
#pragma once

#include <memory>
#include <mutex>
#include <vector>

#include "engine/call.h"
#include "engine/device.h"
#include "schedule/schedule.h"

namespace jax_ub {

// The schedules of a call, indexed by rank. Each schedule is built when it is first
// used. Thread-safe.
class Schedules {
 public:
  // `first` is the schedule of rank 0. The schedules of other ranks are built later.
  explicit Schedules(Schedule first);

  const Schedule& Of(int rank);

 private:
  std::mutex mutex_;
  std::vector<std::unique_ptr<const Schedule>> schedules_;  // [rank]; guarded by mutex_
};

// The number and size of the slots (receive buffers) that a call needs, and the
// schedules that use them.
struct SlotRequirements {
  CollectiveKind collective = CollectiveKind::kAllGather;
  Variant variant = Variant::kPlain;
  int num_splits = 1;
  int num_slots = 0;
  int64_t slot_bytes = 0;
  DType partial_dtype = DType::kF32;  // of partial sums of the GEMM that are sent
  std::shared_ptr<Schedules> schedules;
};

// Computes the number and size of the slots (receive buffers) that a call needs, and
// its schedules. Throws UnsupportedError if the op does not support the method.
SlotRequirements ComputeSlotRequirements(const CallAttributes& attributes,
                                         const RankCall& call,
                                         const Device& device);

// Caches the slot requirements of a call site. Thread-safe, because several launches of
// a program may be in flight.
class SlotPlans {
 public:
  // Returns the slot requirements for the shapes of `call`. Recomputes them only if the
  // shapes differ from the previous call, which does not happen within one XLA program.
  // `attributes` and the properties of `device` must be the same in every call.
  SlotRequirements Find(const CallAttributes& attributes,
                        const RankCall& call,
                        const Device& device);

 private:
  std::mutex mutex_;       // guards `planned_` and `plan_`
  RankCall planned_;       // the call for which `plan_` was computed
  SlotRequirements plan_;  // null schedules: not computed yet
};

}  // namespace jax_ub
