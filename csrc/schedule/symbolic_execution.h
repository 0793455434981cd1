// Executes schedules symbolically, to find violations of the rules that
// schedule/checker.h lists.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "schedule/checker.h"
#include "schedule/schedule.h"

namespace jax_ub {

class SymbolicExecution {
 public:
  explicit SymbolicExecution(const std::vector<RankSchedules>& calls);

  // Executes the schedules of all ranks, which take turns in this order, until none can
  // continue. In its turn, a rank executes one step or, if `greedy`, as many as it can.
  void Run(const std::vector<int>& order, bool greedy);

  const std::vector<std::string>& violations() const { return violations_; }

 private:
  // A vector clock, indexed by rank: how many steps of each rank are known to have
  // happened.
  using Clock = std::vector<int64_t>;

  struct SlotData {
    Payload payload = Payload::kOperand;
    int chunk = kAllChunks;
    int split = 0;
    int source = kNone;
    bool operator==(const SlotData&) const = default;
  };

  // The contents of a slot, and two counts: how many times data has arrived in it, and
  // how many times it has been released. Each count has the vector clock of the rank
  // that incremented it last. A rank that waits for a count merges this clock into its
  // own clock.
  struct Slot {
    int64_t arrived = 0;
    int64_t released = 0;
    Clock arrived_clock;
    Clock released_clock;
    SlotData data;
    bool full = false;    // has arrived and is not released
    bool waited = false;  // its owner has waited for it
    int last_writer = kNone;
    int64_t written_at = 0;    // in steps of the writer
    int64_t last_read_at = 0;  // in steps of the owner
  };

  struct Rank {
    size_t call = 0;
    size_t step = 0;
    Clock clock;
    std::vector<int64_t> epochs;  // [slot]: number of calls that used it
    std::vector<bool> was_put;  // [slot]: this rank put into a peer's slot in this call
    // Indexed by slot: whether, in this call, this rank has filled the slot of a peer,
    // and has then waited until the peer released the slot.
    std::vector<bool> saw_released;
    std::vector<bool> was_used;  // [slot]: used, own or a peer's, in this call
    // How many times this rank has multiplied or copied each split in this call, keyed
    // by (chunk, split).
    std::map<std::pair<int, int>, int> multiplied;
    std::map<std::pair<int, int>, int> copied;
    std::map<int, int> reduced;  // [split]
  };

  const Schedule& ScheduleOf(int rank) const;
  bool Done(int rank) const;
  bool CanStep(int rank) const;
  void TakeStep(int rank);
  void EndCall(int rank);

  void Put(int rank, const Step& step);
  void Wait(int rank, const Step& step);
  void Release(int rank, const Step& step);
  void Consume(int rank, const Step& step);
  void ConsumeChunk(int rank, const Step& step);
  void MultiplyAll(int rank);
  void Reduce(int rank, const Step& step);
  bool HasMultiplied(int rank, int chunk, int split) const;
  // Returns whether the rank can read the split that `data` describes: from one of its
  // slots (see ReadSlot) or, if `slot` is kNone, from its own tensors.
  bool Holds(int rank, const SlotData& data, int slot);
  // Records that the rank reads one of its slots. Returns false if no data has arrived
  // in the slot, or if the rank has not waited for the data.
  bool ReadSlot(int rank, int slot);
  bool HasSource(int rank, const Step& step);
  void CheckCounts(int rank);

  int64_t EpochToWaitFor(int rank, const Step& step) const;
  void Learn(int rank, const Clock& clock);
  void Report(int rank, const Step* step, const std::string& text);

  const std::vector<RankSchedules>& calls_;
  const int num_ranks_;
  std::vector<Rank> ranks_;
  std::vector<std::vector<Slot>> slots_;  // [owner][slot]
  std::vector<std::string> violations_;
};

}  // namespace jax_ub
