// Records the operations that a rank enqueues for consecutive calls: CudaSlots runs the
// schedules, or the reductions by multicast, on a driver that records them.
#pragma once

#include <algorithm>
#include <map>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "cuda/recorded_multicast.h"
#include "cuda/recorded_operations.h"
#include "engine/cuda/multicast_reduce.h"
#include "engine/executor.h"
#include "schedule/checker.h"
#include "transport/cuda/cuda_slots.h"

namespace jax_ub {

// Records consecutive calls of one rank.
class Recorder {
 public:
  Recorder(const Driver& driver,
           const FlagKernels& kernels,
           std::span<const RankSlotAddress> addresses,
           CUdeviceptr error,
           std::map<Piece, PieceId>& pieces)
      : driver_(driver),
        kernels_(kernels),
        sums_(driver, kHopper),
        places_(addresses),
        error_(error),
        pieces_(pieces) {}

  // Records a call. `slot_bytes` differs between calls, so that their slots overlap.
  void Call(const Schedule& schedule, int64_t slot_bytes) {
    CudaSlots slots = MakeSlots(schedule, slot_bytes, nullptr);
    held_.clear();
    const size_t first_read = program_.concurrent.size();
    for (size_t i = 0; i < schedule.steps.size(); ++i) {
      const size_t num_waits = CountSteps(schedule.steps, i, StepKind::kWait);
      if (num_waits == 0) {
        Take(schedule.steps[i], schedule, slots, slot_bytes);
        continue;
      }
      const std::span<const Step> waits(&schedule.steps[i], num_waits);
      slots.WaitAll(SlotsOf(waits), kReason);
      for (const Step& wait : waits) held_[IdOf(wait)] = wait.slot;
      i += num_waits - 1;
    }
    const size_t end = program_.lane.size();
    slots.EndCall();
    slots.Finish({});
    for (size_t i = end; i < program_.lane.size(); ++i) {
      for (size_t read = first_read; read < program_.concurrent.size(); ++read) {
        program_.lane[i].needs |= 1u << read;
      }
    }
    ++call_;
  }

  // Records the check of the partition that precedes a call in a program that was
  // lowered for export.
  void CheckPartition(const Schedule& schedule, bool is_right) {
    static const uint32_t partition = 0;
    MakeSlots(schedule, 0, nullptr)
        .CheckPartition(reinterpret_cast<CUdeviceptr>(&partition), is_right ? 0 : 1);
  }

  // Records an all-reduce by multicast, with the flags of that schedule.
  void CallByMulticast(const Schedule& schedule, int64_t slot_bytes) {
    CallAttributes at;
    at.op = schedule.collective == CollectiveKind::kAllReduce ? Op::kAllReduce
                                                              : Op::kMatmulAllReduce;
    at.method = schedule.method;
    at.num_ranks = schedule.num_ranks;
    at.num_splits = schedule.num_splits;
    at.label = "call";
    const RankCall call = MulticastRecorder::CallOf(at);
    MulticastRecorder device(
        program_, places_, schedule.rank, [&](Payload payload, int owner, int piece) {
          return payload == Payload::kSum
                     ? IdOf({call_, payload, owner, piece, kNone})
                     : IdOf({call_, payload, kAllChunks, piece, owner});
        });
    const MulticastKernels kernels(driver_);
    CudaSlots slots = MakeSlots(schedule, slot_bytes, &kernels);
    ReduceByMulticast(
        at, call, ComputeSlotRequirements(at, call, device), 0,
        [&](const MulticastRange& range) {
          slots.SumByMulticast(range);
          device.NoteSum();
        },
        slots, device);
    slots.Finish({});
    device.NoteNeeds();
    ++call_;
  }

  // Records an all-reduce by one kernel, as its phases.
  void CallInOneKernel(const Schedule& schedule, int64_t slot_bytes) {
    const AllReduceKernel kernel(driver_);
    CudaSlots slots = MakeSlots(schedule, slot_bytes, nullptr, &kernel);
    AllReduceSum sum;
    sum.num_elements = slot_bytes / SizeOf(sum.dtype);
    slots.AllReduce(sum, kReason);
    const Operation launch = program_.lane.back();
    program_.lane.pop_back();
    const auto& params =
        *reinterpret_cast<const AllReduceParams*>(launch.params.data());
    const auto add_phase = [&](const char* name) {
      program_.lane.push_back(launch);
      program_.lane.back().kernel = FindEmulatedKernel(name);
    };
    add_phase(kAnnouncePhase);
    add_phase(kAwaitFreePhase);
    Operation sums;
    for (uint32_t i = 0; i < params.num_peers; ++i) {
      const AllReducePeer& peer = params.peers[i];
      Operation push = launch;  // a kernel: it pushes nothing if the rank has failed
      push.writes = {{peer.to, slot_bytes, PartialOf(schedule.rank)}};
      program_.lane.push_back(push);
      sums.reads.push_back(
          {peer.from, slot_bytes, PartialOf(static_cast<int>(peer.arrived.peer))});
    }
    add_phase(kSignalPhase);
    add_phase(kAwaitPhase);
    program_.lane.push_back(sums);
    slots.EndCall();
    slots.Finish({});
    ++call_;
  }

  const RankProgram& program() const { return program_; }

  // Sets the index of the next call, which determines its pieces and its tag. By
  // default the index increases by one.
  void set_call(int call) { call_ = call; }
  static constexpr uint32_t TagOf(int call) { return call + 1; }

 private:
  static inline const std::string kLabel = "call";
  static inline const WaitReason kReason{kLabel, 0, 0};

  CudaSlots MakeSlots(const Schedule& schedule,
                      int64_t slot_bytes,
                      const MulticastKernels* multicast,
                      const AllReduceKernel* all_reduce = nullptr) {
    SlotStream stream;
    stream.driver = &driver_;
    stream.flags = &kernels_;
    stream.sums = &sums_;
    stream.stream = reinterpret_cast<CUstream>(&program_.lane);
    stream.multicast = multicast;
    stream.all_reduce = all_reduce;
    return {schedule.rank,
            places_,
            error_,
            {.number = 0, .tag = TagOf(call_)},
            {schedule.num_slots, slot_bytes, kRecordedMulticast},
            stream};
  }

  // Returns the piece of all partial sums of a rank.
  PieceId PartialOf(int rank) {
    return IdOf({call_, Payload::kPartial, kAllChunks, 0, rank});
  }
  PieceId IdOf(const Step& step) {
    const int sender = step.payload == Payload::kPartial ? step.peer : kNone;
    return IdOf({call_, step.payload, step.chunk, step.split, sender});
  }
  PieceId IdOf(const Piece& piece) {
    return pieces_.try_emplace(piece, static_cast<PieceId>(pieces_.size() + 1))
        .first->second;
  }

  void Take(const Step& step,
            const Schedule& schedule,
            CudaSlots& slots,
            int64_t slot_bytes) {
    const auto content_of = [&](int slot, PieceId piece) -> Content {
      return {reinterpret_cast<CUdeviceptr>(slots.slot(slot)), slot_bytes, piece};
    };
    std::vector<Operation>& lane = program_.lane;
    switch (step.kind) {
      case StepKind::kWaitFree:
        return slots.WaitAllFree(
            SlotsOf(FirstOfEachPeer(schedule.steps, StepKind::kWaitFree)), kReason);
      case StepKind::kWait:
        return;  // above
      case StepKind::kPut: {
        const PieceId piece = PutOf(step, schedule.rank);
        const size_t copy = lane.size();
        slots.Write(step.peer, step.slot, {nullptr, 1, slot_bytes, 0});
        lane[copy].writes[0].piece = piece;
        if (const auto held = held_.find(piece); held != held_.end()) {
          lane[copy].reads = {content_of(held->second, piece)};
        } else if (step.payload == Payload::kSum) {
          lane[copy].needs = 1u << sums_of_.at(step.split);
        }
        return slots.Signal(step.peer, step.slot);
      }
      case StepKind::kMultiply:
      case StepKind::kCopy: {
        ConcurrentWork product{lane.size(), {}, {}};
        for (int i = 0; i < step.num_chunks; ++i) {
          const auto held = held_.find(IdOf(ChunkOf(step, i)));
          if (held == held_.end()) return;  // reads own operands only
          product.reads.push_back(content_of(held->second, held->first));
        }
        program_.concurrent.push_back(product);
        return;
      }
      case StepKind::kReduce: {
        ConcurrentWork sum{lane.size(), {}, {}};
        sums_of_[step.split] = program_.concurrent.size();
        for (int peer = 0; peer < schedule.num_ranks; ++peer) {
          if (peer == schedule.rank) continue;
          const PieceId part =
              IdOf({call_, Payload::kPartial, step.chunk, step.split, peer});
          sum.reads.push_back(content_of(held_.at(part), part));
        }
        program_.concurrent.push_back(sum);
        return;
      }
      case StepKind::kRelease:
        return slots.Release(step.slot);
      case StepKind::kPublish:
        return;  // method direct, which CUDA has not
    }
  }

  PieceId PutOf(const Step& step, int rank) {
    Step sent = step;
    sent.peer = rank;
    return IdOf(sent);
  }

  const Driver& driver_;
  const FlagKernels& kernels_;
  const SumKernels sums_;
  const std::span<const RankSlotAddress> places_;
  const CUdeviceptr error_;
  std::map<Piece, PieceId>& pieces_;
  RankProgram program_;
  std::map<PieceId, int> held_;    // by this rank, in this call -> slot
  std::map<int, size_t> sums_of_;  // split -> index of its sum in `concurrent`
  int call_ = 0;
};

}  // namespace jax_ub
