#include "schedule/symbolic_execution.h"

#include <algorithm>
#include <sstream>

namespace jax_ub {

namespace {

std::string Describe(const Step& step) {
  std::ostringstream text;
  text << StepKindName(step.kind) << ' ' << PayloadName(step.payload) << " chunk "
       << step.chunk << '.' << step.split;
  if (step.peer != kNone) text << " peer " << step.peer;
  if (step.slot != kNone) text << " slot " << step.slot;
  return text.str();
}

}  // namespace

SymbolicExecution::SymbolicExecution(const std::vector<RankSchedules>& calls)
    : calls_(calls), num_ranks_(static_cast<int>(calls.at(0).size())) {
  size_t num_slots = 0;
  for (const RankSchedules& call : calls) {
    for (const Schedule& schedule : call) {
      num_slots = std::max(num_slots, static_cast<size_t>(schedule.num_slots));
    }
  }
  Rank rank;
  rank.clock.assign(num_ranks_, 0);
  rank.epochs.assign(num_slots, 0);
  rank.was_put.assign(num_slots, false);
  rank.was_used.assign(num_slots, false);
  rank.saw_released.assign(num_slots, false);
  ranks_.assign(num_ranks_, rank);
  Slot slot;
  slot.arrived_clock.assign(num_ranks_, 0);
  slot.released_clock.assign(num_ranks_, 0);
  slots_.assign(num_ranks_, std::vector<Slot>(num_slots, slot));
}

void SymbolicExecution::Run(const std::vector<int>& order, bool greedy) {
  for (bool moved = true; moved;) {
    moved = false;
    for (int rank : order) {
      while (CanStep(rank)) {
        TakeStep(rank);
        moved = true;
        if (!greedy) break;
      }
    }
  }
  for (int rank = 0; rank < num_ranks_; ++rank) {
    if (Done(rank)) continue;
    const Step& step = ScheduleOf(rank).steps[ranks_[rank].step];
    Report(rank, &step, "waits for ever");
  }
  for (int rank = 0; rank < num_ranks_; ++rank) {
    for (const Slot& slot : slots_[rank]) {
      if (slot.full) Report(rank, nullptr, "a slot is full after the last call");
    }
  }
}

const Schedule& SymbolicExecution::ScheduleOf(int rank) const {
  return calls_[ranks_[rank].call][rank];
}

bool SymbolicExecution::Done(int rank) const {
  return ranks_[rank].call == calls_.size();
}

// Returns how many times the peer must have released its slot before the rank may
// continue: once per earlier call that used the slot, plus once if this rank has filled
// it in this call.
int64_t SymbolicExecution::EpochToWaitFor(int rank, const Step& step) const {
  return ranks_[rank].epochs[step.slot] + (ranks_[rank].was_put[step.slot] ? 1 : 0);
}

bool SymbolicExecution::CanStep(int rank) const {
  if (Done(rank)) return false;
  const Schedule& schedule = ScheduleOf(rank);
  if (schedule.steps.empty()) return true;
  const Step& step = schedule.steps[ranks_[rank].step];
  if (step.kind == StepKind::kWait) {
    return slots_[rank][step.slot].arrived >= ranks_[rank].epochs[step.slot] + 1;
  }
  if (step.kind == StepKind::kWaitFree) {
    return slots_[step.peer][step.slot].released >= EpochToWaitFor(rank, step);
  }
  return true;
}

void SymbolicExecution::TakeStep(int rank) {
  Rank& me = ranks_[rank];
  const Schedule& schedule = ScheduleOf(rank);
  if (!schedule.steps.empty()) {
    const Step& step = schedule.steps[me.step];
    ++me.clock[rank];
    switch (step.kind) {
      case StepKind::kPut:
      case StepKind::kPublish:
        Put(rank, step);
        break;
      case StepKind::kWait:
        Wait(rank, step);
        break;
      case StepKind::kWaitFree:
        Learn(rank, slots_[step.peer][step.slot].released_clock);
        if (me.was_put[step.slot]) me.saw_released[step.slot] = true;
        break;
      case StepKind::kRelease:
        Release(rank, step);
        break;
      case StepKind::kMultiply:
      case StepKind::kCopy:
        Consume(rank, step);
        break;
      case StepKind::kReduce:
        Reduce(rank, step);
        break;
    }
    if (++me.step < schedule.steps.size()) return;
  }
  EndCall(rank);
}

void SymbolicExecution::Put(int rank, const Step& step) {
  Rank& me = ranks_[rank];
  Slot& slot = slots_[step.peer][step.slot];
  if (!HasSource(rank, step)) Report(rank, &step, "puts what it does not have");
  if (slot.full) {
    Report(rank, &step, "overwrites a slot that is not released");
  } else if (slot.last_writer != kNone &&
             (me.clock[step.peer] < slot.last_read_at ||
              me.clock[slot.last_writer] < slot.written_at)) {
    Report(rank, &step, "overwrites a slot without having waited for its release");
  }
  if (me.was_put[step.slot]) Report(rank, &step, "puts twice by one slot number");
  if (step.peer == rank) Report(rank, &step, "puts to itself");
  slot.data = {step.payload, step.chunk, step.split, rank};
  slot.full = true;
  slot.waited = false;
  slot.last_writer = rank;
  slot.written_at = me.clock[rank];
  ++slot.arrived;
  slot.arrived_clock = me.clock;
  me.was_put[step.slot] = true;
  me.was_used[step.slot] = true;
}

void SymbolicExecution::Wait(int rank, const Step& step) {
  Rank& me = ranks_[rank];
  Slot& slot = slots_[rank][step.slot];
  Learn(rank, slot.arrived_clock);
  if (slot.waited) Report(rank, &step, "waits twice for one put");
  slot.waited = true;
  me.was_used[step.slot] = true;
  if (slot.data != SlotData{step.payload, step.chunk, step.split, step.peer}) {
    Report(rank, &step, "waits for another split than the one that arrives");
  }
}

void SymbolicExecution::Release(int rank, const Step& step) {
  Slot& slot = slots_[rank][step.slot];
  if (!slot.full || !slot.waited)
    Report(rank, &step, "releases what it did not wait for");
  slot.full = false;
  slot.last_read_at = ranks_[rank].clock[rank];
  ++slot.released;
  slot.released_clock = ranks_[rank].clock;
}

bool SymbolicExecution::ReadSlot(int rank, int slot_index) {
  Slot& slot = slots_[rank][slot_index];
  if (!slot.full || !slot.waited) return false;
  if (ranks_[rank].clock[slot.last_writer] < slot.written_at) return false;
  slot.last_read_at = ranks_[rank].clock[rank];
  return true;
}

bool SymbolicExecution::Holds(int rank, const SlotData& data, int slot_index) {
  if (slot_index != kNone) {
    const SlotData& got = slots_[rank][slot_index].data;
    return got.payload == data.payload && got.chunk == data.chunk &&
           got.split == data.split && ReadSlot(rank, slot_index);
  }
  if (data.chunk != rank) return false;
  return data.payload != Payload::kSum || ranks_[rank].reduced.contains(data.split);
}

// Returns whether the rank has computed its partial sum of a split of a chunk. In a
// collective without a GEMM, partial sums are operands, so the rank has them from the
// start.
bool SymbolicExecution::HasMultiplied(int rank, int chunk, int split) const {
  if (!HasProduct(ScheduleOf(rank).collective)) return true;
  const auto& multiplied = ranks_[rank].multiplied;
  if (chunk != kAllChunks) return multiplied.contains({chunk, split});
  for (int one = 0; one < num_ranks_; ++one) {
    if (!multiplied.contains({one, split})) return false;
  }
  return true;
}

bool SymbolicExecution::HasSource(int rank, const Step& step) {
  if (step.payload == Payload::kPartial) {
    return HasMultiplied(rank, step.chunk, step.split);
  }
  const SlotData data{step.payload, step.chunk, step.split, kNone};
  if (step.chunk == rank) return Holds(rank, data, kNone);
  // All slots are checked, because several may contain this split: the first one may
  // belong to the next call, and this rank may not have waited for it.
  for (size_t slot = 0; slot < slots_[rank].size(); ++slot) {
    if (Holds(rank, data, static_cast<int>(slot))) return true;
  }
  return false;
}

void SymbolicExecution::Consume(int rank, const Step& step) {
  if (step.chunk == kAllChunks) return MultiplyAll(rank);
  for (int i = 0; i < step.num_chunks; ++i) ConsumeChunk(rank, ChunkOf(step, i));
}

void SymbolicExecution::ConsumeChunk(int rank, const Step& step) {
  Rank& me = ranks_[rank];
  if (step.payload != Payload::kPartial &&
      !Holds(rank, {step.payload, step.chunk, step.split, kNone}, step.slot)) {
    Report(rank, &step, "uses a split that has not arrived");
  }
  auto& counts = step.kind == StepKind::kCopy ? me.copied : me.multiplied;
  if (++counts[{step.chunk, step.split}] > 1) {
    Report(rank, &step, "uses a split twice");
  }
}

void SymbolicExecution::MultiplyAll(int rank) {
  Rank& me = ranks_[rank];
  const Schedule& schedule = ScheduleOf(rank);
  for (int chunk = 0; chunk < num_ranks_; ++chunk) {
    for (int split = 0; split < schedule.num_splits; ++split) {
      if (++me.multiplied[{chunk, split}] > 1) {
        Report(rank, nullptr, "multiplies everything twice");
      }
      if (schedule.method == Method::kDirect && chunk != rank) {
        const int slot = (rank + num_ranks_ - chunk) % num_ranks_ - 1;
        if (!Holds(rank, {Payload::kOperand, chunk, split, kNone}, slot)) {
          Report(rank, nullptr, "reads operands that are not published");
        }
      } else if (IsGather(schedule.collective) && schedule.method != Method::kDirect &&
                 !me.copied.contains({chunk, split})) {
        Report(rank, nullptr, "multiplies everything before it is gathered");
      }
    }
  }
}

void SymbolicExecution::Reduce(int rank, const Step& step) {
  Rank& me = ranks_[rank];
  if (++me.reduced[step.split] > 1) Report(rank, &step, "reduces twice");
  const bool one_shot = ScheduleOf(rank).variant == Variant::kOneShot;
  if (step.chunk != (one_shot ? kAllChunks : rank)) {
    Report(rank, &step, "reduces rows that are not its own");
  }
  if (!HasMultiplied(rank, step.chunk, step.split)) {
    Report(rank, &step, "reduces without its own part");
  }
  std::vector<bool> found(num_ranks_, false);
  found[rank] = true;
  for (size_t i = 0; i < slots_[rank].size(); ++i) {
    const Slot& slot = slots_[rank][i];
    if (slot.full && slot.data.payload == Payload::kPartial &&
        slot.data.chunk == step.chunk && slot.data.split == step.split &&
        ReadSlot(rank, static_cast<int>(i))) {
      found[slot.data.source] = true;
    }
  }
  if (std::find(found.begin(), found.end(), false) != found.end()) {
    Report(rank, &step, "reduces before every part has arrived");
  }
}

void SymbolicExecution::CheckCounts(int rank) {
  Rank& me = ranks_[rank];
  const Schedule& schedule = ScheduleOf(rank);
  const auto expect = [&](bool ok, const char* text) {
    if (!ok) Report(rank, nullptr, text);
  };
  const bool direct = schedule.method == Method::kDirect;
  for (int chunk = 0; chunk < num_ranks_; ++chunk) {
    for (int split = 0; split < schedule.num_splits; ++split) {
      const std::pair<int, int> data(chunk, split);
      if (HasProduct(schedule.collective)) {
        expect(me.multiplied.contains(data), "a split is never multiplied");
      }
      const bool gathered = schedule.collective == CollectiveKind::kAllGather ||
                            (schedule.collective == CollectiveKind::kAllGatherMatmul &&
                             schedule.method == Method::kExternal) ||
                            (IsAllReduce(schedule.collective) && !direct &&
                             schedule.variant != Variant::kOneShot && chunk != rank);
      if (gathered) expect(me.copied.contains(data), "a split is never copied");
      if (!IsGather(schedule.collective) && !direct && chunk == rank) {
        expect(me.reduced.contains(split), "a split is never reduced");
      }
    }
  }
  for (const Slot& slot : slots_[rank]) {
    expect(!(slot.full && slot.waited), "a slot is not released");
  }
}

// Ends a call of the rank. Checks that the rank has used the same slots as rank 0:
// otherwise the epochs (use counts) of a slot would differ between ranks.
void SymbolicExecution::EndCall(int rank) {
  Rank& me = ranks_[rank];
  CheckCounts(rank);
  const Schedule& first = calls_[me.call][0];
  std::vector<bool> used(me.was_used.size(), false);
  for (const Step& step : first.steps) {
    if (step.slot != kNone) used[step.slot] = true;
  }
  for (const Step& step : ScheduleOf(rank).steps) {
    if (step.kind != StepKind::kPublish) continue;
    if (!me.saw_released[step.slot]) {
      Report(rank, &step, "ends while the peer may still read its operands");
    }
  }
  if (used != me.was_used) Report(rank, nullptr, "uses other slots than rank 0");
  for (size_t slot = 0; slot < me.epochs.size(); ++slot) {
    if (me.was_used[slot]) ++me.epochs[slot];
  }
  me.was_put.assign(me.was_put.size(), false);
  me.was_used.assign(me.was_used.size(), false);
  me.saw_released.assign(me.saw_released.size(), false);
  me.multiplied.clear();
  me.copied.clear();
  me.reduced.clear();
  me.step = 0;
  ++me.call;
}

void SymbolicExecution::Learn(int rank, const Clock& clock) {
  Clock& mine = ranks_[rank].clock;
  for (int r = 0; r < num_ranks_; ++r) mine[r] = std::max(mine[r], clock[r]);
}

void SymbolicExecution::Report(int rank, const Step* step, const std::string& text) {
  std::ostringstream line;
  const size_t call = std::min(ranks_[rank].call, calls_.size() - 1);
  const Schedule& schedule = calls_[call][rank];
  line << "call " << call << " (" << CollectiveKindName(schedule.collective) << ", "
       << MethodName(schedule.method);
  if (schedule.variant != Variant::kPlain)
    line << ", " << VariantName(schedule.variant);
  line << ") rank " << rank;
  if (step != nullptr) line << ", " << Describe(*step);
  line << ": " << text;
  violations_.push_back(line.str());
}

}  // namespace jax_ub
