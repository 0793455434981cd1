// Builds the schedule of one rank: appends steps to it.
#pragma once

#include "schedule/schedule.h"

namespace jax_ub {

class ScheduleBuilder {
 public:
  explicit ScheduleBuilder(Schedule& schedule) : schedule_(schedule) {}

  int rank() const { return schedule_.rank; }
  int num_ranks() const { return schedule_.num_ranks; }
  int num_splits() const { return schedule_.num_splits; }

  // The ranks form a ring. Ahead returns the rank that is `distance` after this rank,
  // and Behind the rank that is `distance` before it.
  int Ahead(int distance) const { return (rank() + distance) % num_ranks(); }
  int Behind(int distance) const {
    return (rank() + num_ranks() - distance) % num_ranks();
  }

  // Returns the index of the slot (receive buffer) in which a rank receives from the
  // rank that is `distance` before it on the ring.
  int SlotOf(int distance, int split) const {
    return first_slot_ + (distance - 1) * num_splits() + split;
  }
  // Begins another exchange between all ranks. Its steps use new slots.
  void BeginStage() {
    first_slot_ = schedule_.num_slots;
    schedule_.num_slots += (num_ranks() - 1) * num_splits();
  }

  void Add(StepKind kind,
           Payload payload,
           int chunk,
           int split,
           int peer = kNone,
           int slot = kNone) {
    schedule_.steps.push_back({kind, payload, chunk, split, peer, slot});
  }
  // Appends a GEMM of `num_chunks` consecutive chunks, which are in consecutive slots.
  void Multiply(int chunk, int slot, int num_chunks) {
    schedule_.steps.push_back(
        {StepKind::kMultiply, Payload::kOperand, chunk, 0, kNone, slot, num_chunks});
  }
  void MultiplyAll() { Add(StepKind::kMultiply, Payload::kOperand, kAllChunks, 0); }

  // Appends a put or publish (`kind`) into a slot of the peer. First appends a wait
  // until the peer has released the slot, which another rank may have filled in the
  // previous call.
  void Send(StepKind kind, Payload payload, int chunk, int split, int peer, int slot) {
    Add(StepKind::kWaitFree, payload, chunk, split, peer, slot);
    Add(kind, payload, chunk, split, peer, slot);
  }

 private:
  Schedule& schedule_;
  int first_slot_ = 0;
};

// Each of these functions appends the steps of one exchange between all ranks.
// `consume` says what a rank does with a split (part of a chunk) that it has received:
// kMultiply or kCopy.
void AppendAllGather(ScheduleBuilder& builder, Method method, StepKind consume);
void AppendAllGatherOfSums(ScheduleBuilder& builder);
void AppendRingOfPairs(ScheduleBuilder& builder);
void AppendReduceScatter(ScheduleBuilder& builder,
                         bool multiply,
                         bool overlap_first_gemm);
void AppendOneShot(ScheduleBuilder& builder, bool multiply);

}  // namespace jax_ub
