// Writes the steps of one rank.
#pragma once

#include "schedule/schedule.h"

namespace jax_ub {

class ScheduleBuilder {
 public:
  explicit ScheduleBuilder(Schedule& schedule) : schedule_(schedule) {}

  int rank() const { return schedule_.rank; }
  int num_ranks() const { return schedule_.num_ranks; }
  int num_splits() const { return schedule_.num_splits; }

  // The rank `distance` further on the ring, or back.
  int Ahead(int distance) const { return (rank() + distance) % num_ranks(); }
  int Behind(int distance) const {
    return (rank() + num_ranks() - distance) % num_ranks();
  }

  // The slot that holds what the rank `distance` behind its owner has sent.
  int SlotOf(int distance, int split) const {
    return first_slot_ + (distance - 1) * num_splits() + split;
  }
  // Later steps use slots of their own.
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
  // The product of `num_chunks` chunks, in slots one behind the other.
  void Multiply(int chunk, int slot, int num_chunks) {
    schedule_.steps.push_back(
        {StepKind::kMultiply, Payload::kOperand, chunk, 0, kNone, slot, num_chunks});
  }
  void MultiplyAll() { Add(StepKind::kMultiply, Payload::kOperand, kAllChunks, 0); }

  // A put waits for its slot, whoever filled it in an earlier call.
  void Send(StepKind kind, Payload payload, int chunk, int split, int peer, int slot) {
    Add(StepKind::kWaitFree, payload, chunk, split, peer, slot);
    Add(kind, payload, chunk, split, peer, slot);
  }

 private:
  Schedule& schedule_;
  int first_slot_ = 0;
};

// Stages; `consume` is what happens to each piece: kMultiply or kCopy.
void AppendAllGather(ScheduleBuilder& builder,
                     Method method,
                     Payload payload,
                     StepKind consume,
                     bool consume_own);
void AppendRingOfPairs(ScheduleBuilder& builder);
void AppendReduceScatter(ScheduleBuilder& builder,
                         bool multiply,
                         bool overlap_first_gemm);
void AppendOneShot(ScheduleBuilder& builder, bool multiply);
void AppendDirect(ScheduleBuilder& builder);

}  // namespace jax_ub
