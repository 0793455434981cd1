// Calls of every op on emulated GPUs, and what they should give.
#pragma once

#include <cuda.h>

#include <array>
#include <bit>
#include <cstdint>
#include <cstring>
#include <map>
#include <memory>
#include <random>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "call_maker.h"
#include "check.h"
#include "cuda/emulated_cublaslt.h"
#include "cuda/emulated_driver.h"
#include "engine/cuda/cuda_engine.h"
#include "engine_calls.h"
#include "platform/cuda/owners.h"

namespace jax_ub {

// What a GPU runs of every op, by every method.
inline constexpr std::array kMethods = {Method::kRingExchange, Method::kPipeline,
                                        Method::kBulk, Method::kExternal};

template <typename Function>
void ForEachVariant(int num_ranks, const Function& function) {
  for (int op = 0; op < kNumOps; ++op) {
    for (const Method method : kMethods) {
      for (const Attributes& at : Variants(static_cast<Op>(op), method, num_ranks)) {
        if (!HasMethod(at.op, at.method)) continue;
        // Local ops have no method.
        if (IsLocalCall(at) && method != kMethods[0]) continue;
        function(at);
      }
    }
  }
}

// Those of all ranks with one another.
inline std::vector<Attributes> CallsOfPeers(int num_ranks) {
  std::vector<Attributes> found;
  ForEachVariant(num_ranks, [&](const Attributes& at) {
    if (at.num_ranks == num_ranks && !IsLocalCall(at)) found.push_back(at);
  });
  return found;
}

// A process with GPUs, an engine on them, and the streams that XLA would have.
class Gpus {
 public:
  // `its_driver` and `library` are the emulated ones, and may note what they are asked.
  explicit Gpus(EmulatedOptions options,
                double timeout_s = kLongS,
                const Driver& its_driver = EmulatedDriver(),
                const CublasLt& library = EmulatedCublasLt())
      : driver(its_driver),
        machine(options),
        engine_(new CudaEngine(driver, library, timeout_s)) {
    for (int ordinal = 0; ordinal < options.num_devices; ++ordinal) {
      contexts_.emplace_back(driver, ordinal);
      const ScopedContext current(driver, contexts_.back().get());
      streams_.emplace_back(driver);
    }
    workspaces_.resize(options.num_devices);
  }

  // Nothing went wrong, and nothing that was made on it is left.
  ~Gpus() {
    engine_.reset();
    workspaces_.clear();
    streams_.clear();
    contexts_.clear();
    CHECK_EQ(machine.Complaints(), "");
  }
  Gpus(const Gpus&) = delete;
  Gpus& operator=(const Gpus&) = delete;

  CudaEngine& engine() { return *engine_; }
  CUcontext context(int ordinal) const { return contexts_[ordinal].get(); }
  CUstream stream(int ordinal) const { return streams_[ordinal].get(); }
  int num_devices() const { return static_cast<int>(contexts_.size()); }

  DeviceMemory New(int ordinal, int64_t size_bytes) {
    const ScopedContext current(driver, context(ordinal));
    return DeviceMemory(driver, size_bytes);
  }

  // One for all calls of a device: XLA gives memory to one call after another, too.
  // Graphs hold its address, so that one that is too small stays.
  DeviceBytes Workspace(int ordinal, int64_t size_bytes) {
    constexpr int64_t kUsualBytes = int64_t{72} << 20;
    std::vector<DeviceMemory>& memories = workspaces_[ordinal];
    if (memories.empty() || memories.back().size_bytes() < size_bytes) {
      memories.push_back(New(ordinal, std::max(size_bytes, kUsualBytes)));
    }
    return {memories.back().get(), size_bytes};
  }

  void Synchronize(int ordinal) {
    const ScopedContext current(driver, context(ordinal));
    CHECK_EQ(driver.StreamSynchronize(stream(ordinal)), CUDA_SUCCESS);
  }
  void Synchronize() {
    for (int ordinal = 0; ordinal < num_devices(); ++ordinal) Synchronize(ordinal);
  }

  const Driver& driver;
  EmulatedMachine machine;

 private:
  std::vector<Context> contexts_;
  std::vector<Stream> streams_;
  std::vector<std::vector<DeviceMemory>> workspaces_;  // [ordinal]
  std::unique_ptr<CudaEngine> engine_;
};

// Where the ranks are.
struct Placement {
  std::vector<int> ordinals;   // [rank]; empty: ranks are devices 0 ... P - 1
  std::vector<int64_t> ranks;  // Attributes::ranks; empty: the ordinals
  // Attributes::devices; empty: the program was not lowered for export.
  std::vector<int64_t> devices = {};
  // The ranks of this process; empty: all. Of the others it knows the operands only.
  std::vector<int> local_ranks = {};
};

inline float FromBF16(uint16_t bits) {
  return std::bit_cast<float>(static_cast<uint32_t>(bits) << 16);
}
// Of numbers that bf16 has.
inline uint16_t ToBF16(float value) {
  return static_cast<uint16_t>(std::bit_cast<uint32_t>(value) >> 16);
}

// A call site, its calls in f32 on the host, and the same in device memory.
class GpuCalls {
 public:
  // `dtype` is that of the products' operands; gradients that accumulate are f32.
  GpuCalls(Gpus& gpus,
           const Attributes& at,
           const jax_ub_test::Sizes& sizes,
           DType dtype,
           int seed,
           const Placement& placement = {})
      : gpus_(gpus),
        ordinals_(OrdinalsOf(at, placement)),
        local_ranks_(LocalRanksOf(at, placement)),
        site(PlacedAt(at, placement)),
        sizes_(sizes),
        arrays_(std::make_unique<jax_ub_test::Arrays>(seed)),
        calls_(jax_ub_test::MakeCalls(at, sizes, *arrays_)) {
    for (size_t rank = 0; rank < calls_.size(); ++rank) {
      const int ordinal = ordinals_[rank];
      RankCall& call = on_device_.emplace_back();
      const bool sums = at.op == Op::kWgrad || at.op == Op::kBulkReduceScatter;
      const auto mirror = [&](const Tensor& like, DType kind) {
        Tensor tensor = like;
        tensor.dtype = kind;
        memory_.push_back(gpus.New(ordinal, tensor.size_bytes()));
        tensor.data = reinterpret_cast<std::byte*>(memory_.back().get());
        return tensor;
      };
      const size_t n = at.num_kernels;
      for (size_t i = 0; i < calls_[rank].operands.size(); ++i) {
        const bool is_main_grad = sums && at.accumulate && i > n && i <= 2 * n;
        call.operands.push_back(
            mirror(calls_[rank].operands[i], is_main_grad ? DType::kF32 : dtype));
      }
      for (size_t i = 0; i < calls_[rank].results.size(); ++i) {
        const bool is_dw = sums && at.accumulate && i < n;
        call.results.push_back(
            mirror(calls_[rank].results[i], is_dw ? DType::kF32 : dtype));
      }
      if (site.attributes().devices.empty()) continue;
      memory_.push_back(gpus.New(ordinal, sizeof(uint32_t)));
      call.partition = reinterpret_cast<const uint32_t*>(memory_.back().get());
    }
    Load();
  }

  int num_ranks() const { return static_cast<int>(calls_.size()); }
  const std::vector<int>& local_ranks() const { return local_ranks_; }
  int ordinal(int rank) const { return ordinals_[rank]; }
  const RankCall& on_device(int rank) const { return on_device_[rank]; }
  RankCall& on_device(int rank) { return on_device_[rank]; }

  void Initialize(int rank) {
    gpus_.engine().Initialize(site, ordinals_[rank], on_device_[rank]);
  }
  void Execute(int rank) {
    const int ordinal = ordinals_[rank];
    const DeviceBytes workspace = Workspace(rank);
    const EmulatedLaunchesOnly nothing_loads;
    gpus_.engine().Execute(site, ordinal, gpus_.stream(ordinal), on_device_[rank],
                           workspace);
  }
  DeviceBytes Workspace(int rank) {
    return gpus_.Workspace(ordinals_[rank],
                           CudaEngine::WorkspaceBytes(site.attributes(), Shapes(rank)));
  }

  // As XLA does: a thread for each device.
  void RunAll() {
    std::vector<std::thread> threads;
    for (const int rank : local_ranks_) {
      threads.emplace_back([this, rank] {
        Initialize(rank);
        Execute(rank);
      });
    }
    for (std::thread& thread : threads) thread.join();
  }

  // Which partition each rank's device runs; nothing may be using it.
  void SetPartitions(const std::vector<uint32_t>& partitions) {
    for (size_t rank = 0; rank < partitions.size(); ++rank) {
      *const_cast<uint32_t*>(on_device_[rank].partition) = partitions[rank];
    }
  }

  // Other operands, in the same memory; nothing may be using it.
  void Refill(int seed) {
    arrays_ = std::make_unique<jax_ub_test::Arrays>(seed);
    calls_ = jax_ub_test::MakeCalls(site.attributes(), sizes_, *arrays_);
    Load();
  }

  // When the device is done.
  int64_t NumWrong() {
    for (const int rank : local_ranks_) {
      for (size_t i = 0; i < calls_[rank].results.size(); ++i) {
        const Tensor& from = on_device_[rank].results[i];
        auto* to = reinterpret_cast<float*>(calls_[rank].results[i].data);
        for (int64_t e = 0; e < from.num_elements(); ++e) to[e] = Get(from, e);
      }
    }
    return jax_ub_test::NumWrong(site.attributes(), calls_, local_ranks_);
  }

  // Results of a rank that are not NaN.
  int64_t NumNumbers(int rank) const {
    int64_t num = 0;
    for (const Tensor& result : on_device_[rank].results) {
      for (int64_t e = 0; e < result.num_elements(); ++e) {
        const float value = Get(result, e);
        num += value == value;
      }
    }
    return num;
  }

 private:
  static std::vector<int> OrdinalsOf(const Attributes& at, const Placement& placement) {
    std::vector<int> ordinals = placement.ordinals;
    for (int r = 0; placement.ordinals.empty() && r < at.num_ranks; ++r) {
      ordinals.push_back(r);
    }
    return ordinals;
  }
  static std::vector<int> LocalRanksOf(const Attributes& at,
                                       const Placement& placement) {
    std::vector<int> ranks = placement.local_ranks;
    for (int r = 0; placement.local_ranks.empty() && r < at.num_ranks; ++r) {
      ranks.push_back(r);
    }
    return ranks;
  }
  static Attributes PlacedAt(Attributes at, const Placement& placement) {
    if (at.ranks.empty()) return at;
    const std::vector<int> ordinals = OrdinalsOf(at, placement);
    at.ranks = placement.ranks;
    at.devices = placement.devices;
    if (at.ranks.empty()) at.ranks.assign(ordinals.begin(), ordinals.end());
    return at;
  }

  static float Get(const Tensor& tensor, int64_t e) {
    if (tensor.dtype == DType::kF32) {
      return reinterpret_cast<const float*>(tensor.data)[e];
    }
    return FromBF16(reinterpret_cast<const uint16_t*>(tensor.data)[e]);
  }
  static void Set(const Tensor& tensor, int64_t e, float value) {
    if (tensor.dtype == DType::kF32) {
      reinterpret_cast<float*>(tensor.data)[e] = value;
    } else {
      reinterpret_cast<uint16_t*>(tensor.data)[e] = ToBF16(value);
    }
  }

  void Load() {
    for (size_t rank = 0; rank < calls_.size(); ++rank) {
      for (size_t i = 0; i < calls_[rank].operands.size(); ++i) {
        const Tensor& to = on_device_[rank].operands[i];
        const auto* from =
            reinterpret_cast<const float*>(calls_[rank].operands[i].data);
        for (int64_t e = 0; e < to.num_elements(); ++e) Set(to, e, from[e]);
      }
      for (const Tensor& result : on_device_[rank].results) {
        for (int64_t e = 0; e < result.num_elements(); ++e) Set(result, e, -1000);
      }
    }
  }

  RankCall Shapes(int rank) const {
    RankCall call = on_device_[rank];
    for (Tensor& tensor : call.operands) tensor.data = nullptr;
    for (Tensor& tensor : call.results) tensor.data = nullptr;
    return call;
  }

  Gpus& gpus_;
  const std::vector<int> ordinals_;
  const std::vector<int> local_ranks_;

 public:
  CudaCallSite site;

 private:
  const jax_ub_test::Sizes sizes_;
  std::unique_ptr<jax_ub_test::Arrays> arrays_;
  std::vector<RankCall> calls_;
  std::vector<RankCall> on_device_;
  std::vector<DeviceMemory> memory_;
};

// A call of all ranks of the process, captured on their streams.
class CapturedCalls {
 public:
  CapturedCalls(Gpus& gpus, GpuCalls& calls) : gpus_(gpus), calls_(calls) {
    for (const int rank : calls.local_ranks()) calls.Initialize(rank);
    const Driver& driver = gpus.driver;
    for (const int rank : calls.local_ranks()) {
      const CUstream stream = gpus.stream(calls.ordinal(rank));
      calls.Workspace(rank);  // allocates
      const ScopedContext current(driver, gpus.context(calls.ordinal(rank)));
      CHECK_EQ(driver.StreamBeginCapture(stream, CU_STREAM_CAPTURE_MODE_THREAD_LOCAL),
               CUDA_SUCCESS);
      calls.Execute(rank);
      CUgraph graph = nullptr;
      CHECK_EQ(driver.StreamEndCapture(stream, &graph), CUDA_SUCCESS);
      CUgraphExec exec = nullptr;
      CHECK_EQ(driver.GraphInstantiate(&exec, graph, 0), CUDA_SUCCESS);
      CHECK_EQ(driver.GraphDestroy(graph), CUDA_SUCCESS);
      execs_[rank] = exec;
    }
  }
  ~CapturedCalls() {
    for (const auto& [rank, exec] : execs_) gpus_.driver.GraphExecDestroy(exec);
  }
  CapturedCalls(const CapturedCalls&) = delete;
  CapturedCalls& operator=(const CapturedCalls&) = delete;

  void Launch(int rank) {
    const int ordinal = calls_.ordinal(rank);
    const ScopedContext current(gpus_.driver, gpus_.context(ordinal));
    CHECK_EQ(gpus_.driver.GraphLaunch(execs_.at(rank), gpus_.stream(ordinal)),
             CUDA_SUCCESS);
  }
  void LaunchAll() {
    for (const int rank : calls_.local_ranks()) Launch(rank);
  }

 private:
  Gpus& gpus_;
  const GpuCalls& calls_;
  std::map<int, CUgraphExec> execs_;  // [rank]
};

// Ranks that have failed wait for nobody: one may read a slot while another writes it, and
// spoils what it has read. That is no race to be told of.
#ifdef __SANITIZE_THREAD__
inline constexpr bool kFailsOneByOne = true;
#else
inline constexpr bool kFailsOneByOne = false;
#endif

// Of a program that some rank is misplaced in, if not rank 0: that comes last.
inline void LaunchMisplaced(Gpus& gpus, CapturedCalls& captured, int num_ranks) {
  for (int n = 1; n <= num_ranks; ++n) {
    captured.Launch(n % num_ranks);
    if (kFailsOneByOne) gpus.Synchronize(n % num_ranks);
  }
  gpus.Synchronize();
}

inline std::string NameOf(const Attributes& at) {
  return std::string(OpName(at.op)) + " by " + std::string(MethodName(at.method)) +
         ", " + std::string(VariantName(at.variant)) +
         ", P = " + std::to_string(at.num_ranks) + ", " +
         std::to_string(at.num_kernels) + " kernels";
}

inline void CheckRight(GpuCalls& calls) {
  const int64_t num_wrong = calls.NumWrong();
  if (num_wrong == 0) return;
  check::Fail(__FILE__, __LINE__, NameOf(calls.site.attributes()), ": ", num_wrong,
              " wrong");
}

// Replays the calls of the process's ranks, with other operands each time.
inline void CheckReplays(Gpus& gpus,
                         GpuCalls& calls,
                         CapturedCalls& captured,
                         int seed) {
  for (int replay = 0; replay < 3; ++replay) {
    calls.Refill(seed + replay);
    captured.LaunchAll();
    gpus.Synchronize();
    CheckRight(calls);
  }
}

inline void CheckReplays(Gpus& gpus, GpuCalls& calls, int seed) {
  CapturedCalls captured(gpus, calls);
  CheckReplays(gpus, calls, captured, seed);
}

// Runs some calls of all kinds one after the other, each eager or replayed, without a
// pause: slots of one call lie where others had theirs. All processes give the same seed.
inline void CheckInAnyOrder(Gpus& gpus,
                            int num_ranks,
                            const Placement& placement,
                            int seed) {
  std::vector<std::unique_ptr<GpuCalls>> calls;
  std::vector<std::unique_ptr<CapturedCalls>> captured;
  std::mt19937 random(seed);
  ForEachVariant(num_ranks, [&](Attributes at) {
    if (random() % 3 != 0 || at.num_ranks != num_ranks) return;
    const auto up_to = [&](int most) {
      return static_cast<int64_t>(1 + random() % most);
    };
    const jax_ub_test::Sizes sizes = {up_to(2), up_to(9), up_to(9), 3};
    at.channel = "jit_f/" + std::to_string(calls.size());
    calls.push_back(
        std::make_unique<GpuCalls>(gpus, at, sizes, DType::kF32, random(), placement));
  });
  for (const auto& one : calls) {
    captured.push_back(std::make_unique<CapturedCalls>(gpus, *one));
  }
  std::vector<std::pair<size_t, bool>> order;
  for (int i = 0; i < 60; ++i) {
    order.emplace_back(random() % calls.size(), random() % 2);
  }
  std::vector<std::thread> threads;
  for (const int rank : calls[0]->local_ranks()) {
    threads.emplace_back([&, rank] {
      for (const auto& [which, replayed] : order) {
        calls[which]->Initialize(rank);
        if (replayed) {
          captured[which]->Launch(rank);
        } else {
          calls[which]->Execute(rank);
        }
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  gpus.Synchronize();
  for (const auto& [which, replayed] : order) CheckRight(*calls[which]);
}

}  // namespace jax_ub
