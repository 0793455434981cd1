// What a rank enqueues for calls in a row, written down instead of run: its schedules go
// through CudaSlots, and a driver of a few functions keeps launches and copies.
#pragma once

#include <algorithm>
#include <cstring>
#include <map>
#include <span>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "cuda/emulated_kernels.h"
#include "schedule/check.h"
#include "transport/cuda/cuda_slots.h"

namespace jax_ub {

// The piece that a call puts into slots: its number is what lies in them.
using PieceId = uint8_t;
using Piece = std::tuple<int, Payload, int, int, int>;  // call, payload, chunk, split,
                                                        // sender of a partial or kNone

struct Read {
  CUdeviceptr slot = 0;
  int64_t size_bytes = 0;
  PieceId piece = 0;
};

// Kernels and copies are in the order of the communication lane. What reads slots beside
// them may be anywhere behind the waits that it follows.
struct Operation {
  const EmulatedKernel* kernel = nullptr;
  std::vector<std::byte> params;
  unsigned num_blocks = 0;
  unsigned num_threads = 0;
  unsigned cluster_size = 0;  // 0: not asked for
  CUdeviceptr to = 0;         // of a copy
  int64_t size_bytes = 0;
  PieceId piece = 0;
  std::vector<Read> reads;  // by this very copy: what it passes on
  uint32_t needs = 0;       // reads beside the lane that come first: bits
};

struct ReadBeside {
  size_t after = 0;  // this many operations of the lane
  std::vector<Read> reads;
};

struct RankProgram {
  std::vector<Operation> lane;
  std::vector<ReadBeside> beside;
};

inline constexpr int kRecordedSms = 2;

// A driver whose streams are the vectors that launches and copies are appended to.
inline Driver RecordingDriver() {
  Driver driver = {};
  driver.LibraryLoadData = [](CUlibrary* library, const void* image, CUjit_option*,
                              void**, unsigned, CUlibraryOption*, void**, unsigned) {
    *library = reinterpret_cast<CUlibrary>(const_cast<void*>(image));
    return CUDA_SUCCESS;
  };
  driver.LibraryUnload = [](CUlibrary) { return CUDA_SUCCESS; };
  driver.LibraryGetKernel = [](CUkernel* kernel, CUlibrary, const char* name) {
    const EmulatedKernel* found = FindEmulatedKernel(name);
    *kernel = reinterpret_cast<CUkernel>(const_cast<EmulatedKernel*>(found));
    return CUDA_SUCCESS;
  };
  driver.KernelGetFunction = [](CUfunction* function, CUkernel kernel) {
    *function = reinterpret_cast<CUfunction>(kernel);
    return CUDA_SUCCESS;
  };
  driver.LaunchKernelEx = [](const CUlaunchConfig* config, CUfunction function,
                             void** arguments, void**) {
    Operation launch;
    launch.kernel = reinterpret_cast<const EmulatedKernel*>(function);
    const auto* params = static_cast<const std::byte*>(arguments[0]);
    launch.params.assign(params, params + launch.kernel->params_bytes);
    launch.num_blocks = config->gridDimX;
    launch.num_threads = config->blockDimX;
    for (unsigned i = 0; i < config->numAttrs; ++i) {
      if (config->attrs[i].id == CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION) {
        launch.cluster_size = config->attrs[i].value.clusterDim.x;
      }
    }
    reinterpret_cast<std::vector<Operation>*>(config->hStream)->push_back(launch);
    return CUDA_SUCCESS;
  };
  driver.MemcpyAsync = [](CUdeviceptr to, CUdeviceptr, size_t bytes, CUstream stream) {
    Operation copy;
    copy.to = to;
    copy.size_bytes = static_cast<int64_t>(bytes);
    reinterpret_cast<std::vector<Operation>*>(stream)->push_back(copy);
    return CUDA_SUCCESS;
  };
  // Devices are as many as there are compute capabilities: 80 is device 80.
  driver.DeviceGetAttribute = [](int* value, CUdevice_attribute attribute,
                                 CUdevice device) {
    *value = attribute == CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR ? device / 10
                                                                       : kRecordedSms;
    return CUDA_SUCCESS;
  };
  return driver;
}

// The calls of one rank, in a row.
class Recorder {
 public:
  Recorder(const Driver& driver,
           const FlagKernels& kernels,
           std::span<const RankPlace> places,
           CUdeviceptr error,
           std::map<Piece, PieceId>& pieces)
      : driver_(driver),
        kernels_(kernels),
        places_(places),
        error_(error),
        pieces_(pieces) {}

  // Slots of `slot_bytes` each, which differ from call to call so that they overlap.
  void Call(const Schedule& schedule, int64_t slot_bytes) {
    SlotStream stream;
    stream.driver = &driver_;
    stream.flags = &kernels_;
    stream.stream = reinterpret_cast<CUstream>(&program_.lane);
    CudaSlots slots(schedule.rank, places_, error_, 0, {schedule.num_slots, slot_bytes},
                    stream, nullptr);
    held_.clear();
    const size_t first_read = program_.beside.size();
    for (const Step& step : schedule.steps) Take(step, schedule, slots);
    const size_t end = program_.lane.size();
    slots.EndCall();
    for (size_t i = end; i < program_.lane.size(); ++i) {
      for (size_t read = first_read; read < program_.beside.size(); ++read) {
        program_.lane[i].needs |= 1u << read;
      }
    }
    ++call_;
  }

  const RankProgram& program() const { return program_; }

 private:
  PieceId IdOf(const Step& step) {
    const int sender = step.payload == Payload::kPartial ? step.peer : kNone;
    return IdOf({call_, step.payload, step.chunk, step.split, sender});
  }
  PieceId IdOf(const Piece& piece) {
    return pieces_.try_emplace(piece, static_cast<PieceId>(pieces_.size() + 1))
        .first->second;
  }

  Read ReadOf(int slot, PieceId piece, const CudaSlots& slots) const {
    return {reinterpret_cast<CUdeviceptr>(slots.slot(slot)), slots.slot_bytes(), piece};
  }

  void Take(const Step& step, const Schedule& schedule, CudaSlots& slots) {
    static const std::string label = "call";
    const WaitReason reason{label, step.chunk, 0};
    std::vector<Operation>& lane = program_.lane;
    switch (step.kind) {
      case StepKind::kWaitFree:
        return slots.WaitFree(step.peer, step.slot, reason);
      case StepKind::kWait:
        slots.Wait(step.peer, step.slot, reason);
        held_[IdOf(step)] = step.slot;
        return;
      case StepKind::kPut: {
        const PieceId piece = PutOf(step, schedule.rank);
        const size_t copy = lane.size();
        slots.Write(step.peer, step.slot, 0, {nullptr, 1, slots.slot_bytes(), 0});
        lane[copy].piece = piece;
        if (const auto held = held_.find(piece); held != held_.end()) {
          lane[copy].reads = {ReadOf(held->second, piece, slots)};
        } else if (step.payload == Payload::kSum) {
          lane[copy].needs = 1u << (program_.beside.size() - 1);  // the sum itself
        }
        return slots.Signal(step.peer, step.slot);
      }
      case StepKind::kMultiply:
      case StepKind::kCopy: {
        ReadBeside product{lane.size(), {}};
        for (int i = 0; i < step.num_chunks; ++i) {
          const auto held = held_.find(IdOf(ChunkOf(step, i)));
          if (held == held_.end()) return;  // reads own operands only
          product.reads.push_back(ReadOf(held->second, held->first, slots));
        }
        program_.beside.push_back(product);
        return;
      }
      case StepKind::kReduce: {
        ReadBeside sum{lane.size(), {}};
        for (int peer = 0; peer < schedule.num_ranks; ++peer) {
          if (peer == schedule.rank) continue;
          const PieceId part =
              IdOf({call_, Payload::kPartial, step.chunk, step.split, peer});
          sum.reads.push_back(ReadOf(held_.at(part), part, slots));
        }
        program_.beside.push_back(sum);
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
  const std::span<const RankPlace> places_;
  const CUdeviceptr error_;
  std::map<Piece, PieceId>& pieces_;
  RankProgram program_;
  std::map<PieceId, int> held_;  // by this rank, in this call -> slot
  int call_ = 0;
};

}  // namespace jax_ub
