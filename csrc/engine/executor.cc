#include "engine/executor.h"

#include <algorithm>
#include <utility>

#include "engine/communicated_tensors.h"
#include "engine/gemm_builders.h"
#include "engine/lane_dependencies.h"
#include "platform/error.h"

namespace jax_ub {

namespace {

// Executes one rank's schedule for one of the tensors that the call communicates.
class ScheduleRun {
 public:
  // `concurrent_gemms` are the GEMMs of a bulk op. They run concurrently with the
  // communication, because they do not depend on it.
  ScheduleRun(const CallAttributes& at,
              const RankCall& call,
              const CommunicatedTensor& communicated,
              const Schedule& schedule,
              const SlotRequirements& plan,
              double timeout_s,
              std::vector<GemmProblem> concurrent_gemms,
              Transport& transport,
              Device& device,
              LaneDependencies& lanes,
              const TraceContext& trace)
      : at_(at),
        call_(call),
        communicated_(communicated),
        schedule_(schedule),
        timeout_s_(timeout_s),
        concurrent_gemms_(std::move(concurrent_gemms)),
        transport_(transport),
        device_(device),
        lanes_(lanes),
        trace_(trace),
        received_(3 * schedule.num_ranks * schedule.num_splits),
        produced_(received_.size()),
        readers_(1 + device.num_product_lanes()) {
    if (HasProduct(schedule.collective) && !IsGather(schedule.collective)) {
      partial_ = device.Allocate(plan.partial_dtype, communicated.operand.batch,
                                 communicated.num_rows, communicated.result.features);
    } else {
      partial_ = communicated.operand;
    }
  }

  // Executes all steps. On a device that enqueues, such as a GPU, each step waits only
  // for the work on which it depends:
  //
  //   GEMM of received data  <- the wait for this data
  //   put of a partial sum   <- its GEMM
  //   sum                    <- the waits for all partial sums, and this rank's GEMM
  //   put of a sum           <- that sum
  //   GEMM of all rows       <- the copies of all rows
  //   end of the call        <- GEMM lanes that read slots
  void Run() {
    const std::vector<Step>& steps = schedule_.steps;
    for (size_t i = 0; i < steps.size(); ++i) {
      // The concurrent GEMMs start before the first wait. By then, all data that can be
      // sent without a wait have been sent.
      if (steps[i].kind == StepKind::kWait) RunConcurrentGemms();
      if (steps[i].kind == StepKind::kWait && device_.enqueues()) {
        const size_t count = CountSteps(steps, i, StepKind::kWait);
        WaitAll({&steps[i], count});
        i += count - 1;
      } else {
        Take(steps[i]);
      }
    }
    RunConcurrentGemms();
    for (Lane lane = 1; lane < static_cast<Lane>(readers_.size()); ++lane) {
      const LaneSlotReads& reader = readers_[lane];
      if (!reader.reads_slots) continue;
      const bool is_known = reader.last.index != kNone;
      lanes_.Await(kCommunicationLane, is_known ? reader.last : lanes_.Record(lane));
    }
    transport_.EndCall();
  }

 private:
  // Where a received split (part of a chunk) is stored, and the event after which it
  // may be read.
  struct ReceivedSplit {
    int slot = kNone;
    Dependency arrival;
  };

  // Whether a GEMM lane (stream) reads slots (receive buffers), and the event after its
  // last read, if one was recorded.
  struct LaneSlotReads {
    bool reads_slots = false;
    Dependency last;
  };

  void Take(const Step& step) {
    const WaitReason reason{at_.label, step.chunk, timeout_s_};
    // Each StepKind has the same value as the TraceKind of its span.
    const TraceScope scope(trace_, static_cast<TraceKind>(step.kind), step);
    switch (step.kind) {
      case StepKind::kMultiply:
        return Multiply(step);
      case StepKind::kCopy:
        return CopySplit(step);
      case StepKind::kReduce:
        return Reduce(step);
      case StepKind::kPut:
        return Put(step);
      case StepKind::kPublish:
        return transport_.Signal(step.peer, step.slot);
      case StepKind::kWait:
        transport_.Wait(step.peer, step.slot, reason);
        return Receive(step, {});
      case StepKind::kRelease:
        return transport_.Release(step.slot);
      case StepKind::kWaitFree:
        return WaitFree(step, reason);
    }
  }

  // Returns the index of a split (part of a chunk) in `received_` and `produced_`.
  // kAllChunks has the index of chunk 0.
  size_t IndexOf(Payload payload, int chunk, int split) const {
    return (static_cast<size_t>(payload) * schedule_.num_ranks + std::max(chunk, 0)) *
               schedule_.num_splits +
           split;
  }
  // Returns the state of a split that a peer sends. `chunk` is the sender's rank if the
  // payload is a partial sum, else the index of the chunk.
  ReceivedSplit& ReceivedOf(Payload payload, int chunk, int split) {
    return received_[IndexOf(payload, chunk, split)];
  }
  // Returns the event after which this rank has computed a split (part of a chunk).
  Dependency& ProducedBy(Payload payload, int chunk, int split) {
    return produced_[IndexOf(payload, chunk, split)];
  }

  // Waits for the data of several consecutive kWait steps at once, with a single call
  // of the transport.
  void WaitAll(std::span<const Step> steps) {
    transport_.WaitAll(SlotsOf(steps), {at_.label, steps[0].chunk, timeout_s_});
    // Other lanes (streams) wait for an event before they read the received data. Only
    // two kinds of data need an event here: sums, and the operands of an overlapped
    // GEMM. The communication lane itself reads all other data, and Reduce records one
    // event for all partial sums.
    const bool is_awaited = steps[0].payload == Payload::kSum ||
                            (schedule_.collective == CollectiveKind::kAllGatherMatmul &&
                             schedule_.method != Method::kExternal);
    Dependency arrival;
    if (is_awaited) arrival = lanes_.Record(kCommunicationLane);
    for (const Step& step : steps) Receive(step, arrival);
  }

  void Receive(const Step& step, Dependency arrival) {
    const bool partial = step.payload == Payload::kPartial;
    ReceivedOf(step.payload, partial ? step.peer : step.chunk, step.split) = {step.slot,
                                                                              arrival};
  }

  // Waits until a slot (receive buffer) of a peer is free. On a device that enqueues
  // its work, only the first such step waits: until all peers to which the schedule
  // writes have begun the call. This longer wait does not delay the end of the call,
  // because the call cannot end before its last rank begins.
  void WaitFree(const Step& step, const WaitReason& reason) {
    if (!device_.enqueues()) return transport_.WaitFree(step.peer, step.slot, reason);
    if (is_free_) return;
    is_free_ = true;
    transport_.WaitAllFree(
        SlotsOf(FirstOfEachPeer(schedule_.steps, StepKind::kWaitFree)), reason);
  }

  RowRange RowsOfChunk(int chunk, int split) const {
    if (chunk == kAllChunks) return {0, communicated_.num_rows};
    return SplitRows(communicated_.num_rows, schedule_.num_ranks, schedule_.num_splits,
                     chunk, split);
  }
  RowRange RowsOfChunk(const Step& step) const {
    return RowsOfChunk(step.chunk, step.split);
  }

  // Returns the global row index of the first row of `tensor`, which is either the
  // whole tensor or the shard of one chunk.
  int64_t FirstRow(const Tensor& tensor, int chunk) const {
    return tensor.rows == communicated_.num_rows ? 0 : RowsOfChunk(chunk, 0).begin;
  }

  RowSlice SliceOf(const Tensor& tensor,
                   const Step& step,
                   const Tensor& scales = {}) const {
    const RowRange rows = RowsOfChunk(step);
    const int64_t first = FirstRow(tensor, step.chunk);
    return {tensor, rows.begin - first, rows.end - first, scales};
  }

  // Returns the rows that a step sends or reads. Rows of this rank are in one of its
  // tensors. Received rows are in one of its slots (receive buffers).
  RowSlice Source(const Step& step) {
    const bool own = step.chunk == schedule_.rank;
    if (step.payload == Payload::kPartial) return SliceOf(partial_, step);
    const bool is_sum = step.payload == Payload::kSum;
    const Tensor& tensor = is_sum ? communicated_.result : communicated_.operand;
    const Tensor scales = is_sum ? Tensor{} : communicated_.scales;
    if (own) return SliceOf(tensor, step, scales);
    const RowRange rows = RowsOfChunk(step);
    return PackedSlice(
        {tensor, rows.begin, rows.end, scales},
        transport_.slot(ReceivedOf(step.payload, step.chunk, step.split).slot));
  }

  void Put(const Step& step) {
    lanes_.Await(kCommunicationLane, ProducedBy(step.payload, step.chunk, step.split));
    const RowSlice from = Source(step);
    transport_.Write(step.peer, step.slot, from.rows());
    if (from.has_scales()) transport_.Write(step.peer, step.slot, from.scale_rows());
    transport_.Signal(step.peer, step.slot);
  }

  // Copies received rows to the gathered result. In an all-reduce, the rows that a peer
  // has summed are copied on a GEMM lane, because the communication lane must send
  // further splits.
  void CopySplit(const Step& step) {
    if (communicated_.gathered.data == nullptr) return;
    if (step.payload != Payload::kSum) return CopySplit(kCommunicationLane, step);
    const Lane lane = lanes_.NextProduct();
    lanes_.Await(lane, ReceivedOf(step.payload, step.chunk, step.split).arrival);
    CopySplit(lane, step);
    readers_[lane] = {true, {}};
  }
  void CopySplit(Lane lane, const Step& step) {
    const RowSlice from = Source(step);
    const RowSlice to =
        SliceOf(communicated_.gathered, step, communicated_.gathered_scales);
    CopyRows(lane, from.rows(), to.rows());
    if (from.has_scales()) CopyRows(lane, from.scale_rows(), to.scale_rows());
  }
  void CopyRows(Lane lane, const Rows& from, const Rows& to) {
    device_.Copy(lane, from, const_cast<std::byte*>(to.data), to.stride_bytes);
  }

  void Multiply(const Step& step) {
    const Lane lane = lanes_.NextProduct();
    if (IsGather(schedule_.collective)) {
      MultiplyGathered(lane, step);
    } else {
      MultiplyPartial(lane, step);
    }
  }

  void MultiplyGathered(Lane lane, const Step& step) {
    if (step.chunk == kAllChunks) {
      const Tensor& x = communicated_.gathered;
      lanes_.Await(lane, lanes_.Record(kCommunicationLane));
      const RowSlice all{x, 0, x.rows, communicated_.gathered_scales};
      return Compute(lane, GatherProducts(at_, call_, {&all, 1}, 0), step);
    }
    std::vector<RowSlice> slices;
    Dependency arrival;  // arrival of the last split
    for (int i = 0; i < step.num_chunks; ++i) {
      const Step one = ChunkOf(step, i);
      slices.push_back(Source(one));
      const ReceivedSplit& received = ReceivedOf(one.payload, one.chunk, one.split);
      if (received.arrival.index > arrival.index) arrival = received.arrival;
    }
    if (step.chunk != schedule_.rank) {
      lanes_.Await(lane, arrival);
      readers_[lane] = {true, {}};
    }
    Compute(lane, GatherProducts(at_, call_, slices, RowsOfChunk(step).begin), step);
    if (communicated_.gathered.data == nullptr) return;
    for (int i = 0; i < step.num_chunks; ++i) CopySplit(lane, ChunkOf(step, i));
  }

  void MultiplyPartial(Lane lane, const Step& step) {
    const RowRange rows = RowsOfChunk(step);
    Compute(lane, PartialProducts(at_, call_, partial_, rows.begin, rows.end), step);
    const Dependency produced = lanes_.Record(lane);
    if (step.chunk != kAllChunks) {
      ProducedBy(Payload::kPartial, step.chunk, step.split) = produced;
      return;
    }
    for (int chunk = 0; chunk < schedule_.num_ranks; ++chunk) {
      for (int split = 0; split < schedule_.num_splits; ++split) {
        ProducedBy(Payload::kPartial, chunk, split) = produced;
      }
    }
  }

  // Runs the GEMMs that do not depend on the communication. All of them run on one lane
  // (an ordered queue of work, see device.h), so that the sums of partial results can
  // run on another lane at the same time.
  void RunConcurrentGemms() {
    if (concurrent_gemms_.empty()) return;
    Compute(lanes_.NextProduct(), std::exchange(concurrent_gemms_, {}), {});
  }

  void Compute(Lane lane, std::vector<GemmProblem> problems, const Step& step) {
    if (!problems.empty()) device_.Multiply(lane, std::move(problems), step);
  }

  // Adds the partial sums of all ranks in rank order, then bias and residual. Rounds
  // only the final sum.
  void Reduce(const Step& step) {
    const RowSlice own = SliceOf(partial_, step);
    const RowSlice out = SliceOf(communicated_.result, step);
    if (out.num_rows() == 0) return;
    const Lane lane = lanes_.NextProduct();
    if (schedule_.num_ranks > 1) {
      // The wait for the partial sums is the latest work on the communication lane, so
      // an event that is recorded here occurs after it.
      lanes_.Await(lane, lanes_.Record(kCommunicationLane));
    }
    lanes_.Await(lane, ProducedBy(Payload::kPartial, step.chunk, step.split));
    for (int64_t b = 0; b < out.tensor.batch; ++b) {
      std::vector<ConstMatrix> parts;
      for (int r = 0; r < schedule_.num_ranks; ++r) {
        const RowSlice part =
            r == schedule_.rank
                ? own
                : PackedSlice(own,
                              transport_.slot(
                                  ReceivedOf(Payload::kPartial, r, step.split).slot));
        parts.push_back(
            {part.tensor.At(b, part.begin), part.tensor.features, part.tensor.dtype});
      }
      AddBiasAndResidual(at_, call_, b, out.begin, parts);
      device_.Sum(lane, parts, out.num_rows(), out.tensor.features,
                  {out.tensor.At(b, out.begin), out.tensor.features, out.tensor.dtype});
    }
    const bool is_sent =
        IsAllReduce(schedule_.collective) && schedule_.variant != Variant::kOneShot;
    Dependency& produced = ProducedBy(Payload::kSum, step.chunk, step.split);
    if (is_sent) produced = lanes_.Record(lane);
    readers_[lane] = {true, produced};
  }

  const CallAttributes& at_;
  const RankCall& call_;
  const CommunicatedTensor& communicated_;
  const Schedule& schedule_;
  const double timeout_s_;
  std::vector<GemmProblem> concurrent_gemms_;
  Transport& transport_;
  Device& device_;
  LaneDependencies& lanes_;
  const TraceContext& trace_;
  std::vector<ReceivedSplit> received_;  // [payload][chunk][split], see IndexOf
  std::vector<Dependency> produced_;     // [payload][chunk][split], see IndexOf
  std::vector<LaneSlotReads> readers_;   // [lane]
  bool is_free_ = false;                 // whether the call may write to its peers
  Tensor partial_;
};

// Runs the GEMMs of a call that need no communication. The GEMMs start after the event
// `ready`, when their operands can be read.
void RunLocalGemms(const CallAttributes& at,
                   const RankCall& call,
                   const Dependency& ready,
                   Device& device,
                   LaneDependencies& lanes) {
  const auto multiply = [&](std::vector<GemmProblem> problems) {
    const Lane lane = lanes.NextProduct();
    lanes.Await(lane, ready);
    device.Multiply(lane, std::move(problems), {});
  };
  std::vector<GemmProblem> problems = LocalProducts(at, call);
  if (!device.enqueues()) return multiply(std::move(problems));
  for (GemmProblem& problem : problems) {
    std::vector<GemmProblem> one;
    one.push_back(std::move(problem));
    multiply(std::move(one));
  }
}

}  // namespace

std::vector<PeerSlot> SlotsOf(std::span<const Step> steps) {
  std::vector<PeerSlot> slots;
  for (const Step& step : steps) slots.push_back({step.peer, step.slot, step.chunk});
  return slots;
}

bool UsesSlots(const CallAttributes& at) {
  return at.method != Method::kDirect && !IsLocalCall(at);
}

void ExecuteRank(const CallAttributes& at,
                 const RankCall& call,
                 const SlotRequirements& plan,
                 double timeout_s,
                 Transport& transport,
                 Device& device,
                 const TraceContext& trace) {
  const Schedule& schedule = plan.schedules->Of(transport.rank());
  const OpInfo& info = InfoOf(at.op);
  // `gathers_first`: all GEMMs run after the communication. `is_whole`: the GEMMs read
  // the whole gathered operand instead of single splits, so this operand must be
  // stored.
  const bool gathers_first = info.communicated == Communicated::kSelectedOperand;
  const bool is_whole =
      gathers_first || (info.communicated == Communicated::kFirstOperand &&
                        at.method == Method::kExternal);
  LaneDependencies lanes(device);
  std::vector<GemmProblem> concurrent_gemms;
  if (device.enqueues() && info.is_bulk()) concurrent_gemms = LocalProducts(at, call);
  RankCall local = call;
  const std::vector<size_t> indices = CommunicatedOperands(at, call);
  size_t next = 0;
  const auto allocate = [&](Tensor& tensor) {
    tensor = device.Allocate(tensor.dtype, tensor.batch, tensor.rows, tensor.features);
  };
  for (CommunicatedTensor communicated : CommunicatedTensorsOf(at, call)) {
    if (is_whole && communicated.gathered.data == nullptr) {
      allocate(communicated.gathered);
      if (communicated.scales.data != nullptr) allocate(communicated.gathered_scales);
    }
    ScheduleRun(at, call, communicated, schedule, plan, timeout_s,
                std::exchange(concurrent_gemms, {}), transport, device, lanes, trace)
        .Run();
    if (!gathers_first) continue;
    const size_t index = indices[next++];
    local.operands[index] = communicated.gathered;
    if (communicated.scales.data != nullptr) {
      local.scales[index] = communicated.gathered_scales;
    }
  }
  if (!gathers_first) return;
  const TraceScope scope(trace, TraceKind::kMultiply);
  const Dependency gathered = lanes.Record(kCommunicationLane);
  RunLocalGemms(at, local, gathered, device, lanes);
}

void ExecuteLocal(const CallAttributes& at, const RankCall& call, Device& device) {
  LaneDependencies lanes(device);
  RunLocalGemms(at, call, {}, device, lanes);
}

}  // namespace jax_ub
