// Makes calls of every op on emulated GPUs, and compares their results with the
// expected ones.
#pragma once

#include <cuda.h>

#include <array>
#include <cmath>
#include <cstdint>
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
#include "random_gemm.h"

namespace jax_ub {

// The methods of calls on GPUs.
inline constexpr std::array kMethods = {Method::kRingExchange, Method::kPipeline,
                                        Method::kBulk, Method::kExternal};

template <typename Function>
void ForEachVariant(int num_ranks, const Function& function) {
  for (int op = 0; op < kNumOps; ++op) {
    for (const Method method : kMethods) {
      for (const CallAttributes& at :
           Variants(static_cast<Op>(op), method, num_ranks)) {
        if (!HasMethod(at.op, at.method)) continue;
        // Local ops ignore the method, so they run once.
        if (IsLocalCall(at) && method != kMethods[0]) continue;
        function(at);
      }
    }
  }
}

// Returns the variants that communicate between all ranks.
inline std::vector<CallAttributes> CallsOfPeers(int num_ranks) {
  std::vector<CallAttributes> found;
  ForEachVariant(num_ranks, [&](const CallAttributes& at) {
    if (at.num_ranks == num_ranks && !IsLocalCall(at)) found.push_back(at);
  });
  return found;
}

// A process with emulated GPUs, an engine that uses them, and the streams that XLA
// would create.
class Gpus {
 public:
  // `its_driver` and `library` are the emulated driver and cuBLASLt, or wrappers that
  // record their calls.
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
      capturing_.emplace_back(driver);
    }
    workspaces_.resize(options.num_devices);
  }

  // Checks that the emulated driver reports no violation, and that no object is left.
  ~Gpus() {
    engine_.reset();
    workspaces_.clear();
    streams_.clear();
    capturing_.clear();
    contexts_.clear();
    CHECK_EQ(machine.Complaints(), "");
  }
  Gpus(const Gpus&) = delete;
  Gpus& operator=(const Gpus&) = delete;

  CudaEngine& engine() { return *engine_; }
  CUcontext context(int ordinal) const { return contexts_[ordinal].get(); }
  CUstream stream(int ordinal) const { return streams_[ordinal].get(); }
  // Returns the stream on which calls are captured.
  CUstream capturing(int ordinal) const { return capturing_[ordinal].get(); }
  int num_devices() const { return static_cast<int>(contexts_.size()); }

  DeviceMemory New(int ordinal, int64_t size_bytes) {
    const ScopedContext current(driver, context(ordinal));
    return DeviceMemory(driver, size_bytes);
  }

  // Returns the workspace that all calls of a device share, as XLA reuses memory for
  // successive calls. Graphs contain its address, so a workspace that is too small is
  // kept when a larger one is allocated.
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
  std::vector<Stream> capturing_;
  std::vector<std::vector<DeviceMemory>> workspaces_;  // [ordinal]
  std::unique_ptr<CudaEngine> engine_;
};

// Assigns ranks to devices and processes.
struct Placement {
  std::vector<int> ordinals;   // [rank]; empty: ranks are devices 0 ... P - 1
  std::vector<int64_t> ranks;  // Attributes::ranks; empty: the ordinals
  // The value of Attributes::devices; empty: the program was not lowered for export.
  std::vector<int64_t> devices = {};
  // The ranks of this process; empty: all ranks. Of the other ranks this process knows
  // only the operands.
  std::vector<int> local_ranks = {};
};

// A call site, with one call per rank in f32 on the host, and a copy of it in device
// memory.
class GpuCalls {
 public:
  // `dtype` is the dtype of the GEMMs' operands; gradients that are accumulated are
  // f32. If it is FP8, `at` has scales: activations are e4m3, kernels and gradients have
  // the dtype, and other arrays are bf16. With `has_row_scales`, each row of an
  // activation and each output of a kernel has a scale, or with `has_blocks` each block
  // of 32 features of an activation and of 32 inputs of a kernel.
  GpuCalls(Gpus& gpus,
           const CallAttributes& at,
           const jax_ub_test::Sizes& sizes,
           DType dtype,
           int seed,
           const Placement& placement = {},
           bool has_blocks = false)
      : gpus_(gpus),
        ordinals_(OrdinalsOf(at, placement)),
        local_ranks_(LocalRanksOf(at, placement)),
        site(PlacedAt(at, placement)),
        sizes_(sizes),
        arrays_(std::make_unique<jax_ub_test::Arrays>(seed)),
        calls_(jax_ub_test::MakeCalls(at, sizes, *arrays_)),
        dtype_(dtype),
        has_blocks_(has_blocks) {
    Move(0);
  }

  int num_ranks() const { return static_cast<int>(calls_.size()); }
  const std::vector<int>& local_ranks() const { return local_ranks_; }
  int ordinal(int rank) const { return ordinals_[rank]; }
  const RankCall& on_device(int rank) const { return on_device_[rank]; }
  RankCall& on_device(int rank) { return on_device_[rank]; }

  void Initialize(int rank) {
    gpus_.engine().Initialize(site, ordinals_[rank], on_device_[rank]);
  }
  void Execute(int rank) { Execute(rank, gpus_.stream(ordinals_[rank])); }
  void Execute(int rank, CUstream stream) {
    const DeviceBytes workspace = Workspace(rank);
    const EmulatedLaunchesOnly nothing_loads;
    gpus_.engine().Execute(site, ordinals_[rank], stream, on_device_[rank], workspace);
  }
  void ExecuteTogether(int rank) {
    gpus_.engine().ExecuteTogether(site, ordinals_[rank], gpus_.stream(ordinals_[rank]),
                                   on_device_[rank], Workspace(rank));
  }
  DeviceBytes Workspace(int rank) {
    return gpus_.Workspace(ordinals_[rank],
                           CudaEngine::WorkspaceBytes(site.attributes(), Shapes(rank)));
  }

  // Runs the calls of all local ranks, in one thread per device, as XLA does.
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

  // Sets the partition that each rank's device executes. No call may be running.
  void SetPartitions(const std::vector<uint32_t>& partitions) {
    for (size_t rank = 0; rank < partitions.size(); ++rank) {
      *const_cast<uint32_t*>(on_device_[rank].partition) = partitions[rank];
    }
  }

  // Moves operands and results to memory number `place`. The same number always selects
  // the same memory. Like the parameters of an XLA program, all arrays except the first
  // are aligned to 16 bytes.
  void Move(size_t place) {
    while (places_.size() <= place) places_.push_back(NewPlace(16 * places_.size()));
    for (size_t rank = 0; rank < on_device_.size(); ++rank) {
      if (on_device_[rank].partition == nullptr) continue;
      *const_cast<uint32_t*>(places_[place][rank].partition) =
          *on_device_[rank].partition;
    }
    on_device_ = places_[place];
    Load();
  }

  // Writes new operands to the same memory. No call may be running.
  void Refill(int seed) {
    arrays_ = std::make_unique<jax_ub_test::Arrays>(seed);
    calls_ = jax_ub_test::MakeCalls(site.attributes(), sizes_, *arrays_);
    Load();
  }

  // Returns the number of wrong elements. Requires that the devices have finished.
  int64_t NumWrong() {
    for (const int rank : local_ranks_) {
      for (size_t i = 0; i < calls_[rank].results.size(); ++i) {
        const Tensor& from = on_device_[rank].results[i];
        auto* to = reinterpret_cast<float*>(calls_[rank].results[i].data);
        for (int64_t e = 0; e < from.num_elements(); ++e) to[e] = Get(from, e);
        if (!IsFp8(from.dtype)) continue;
        const RankCall& call = on_device_[rank];
        const bool has_rows = site.attributes().has_row_scales;
        const Tensor& scales = has_rows ? call.results[i + 1] : call.scales[0];
        for (int64_t e = 0; e < from.num_elements(); ++e) {
          to[e] *= ScaleAt(scales, from, e);
        }
      }
    }
    return jax_ub_test::NumWrong(site.attributes(), calls_, local_ranks_);
  }

  // Returns the number of elements of a rank's results that are not NaN.
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
  std::vector<RankCall> NewPlace(size_t offset) {
    const CallAttributes& at = site.attributes();
    const size_t n = at.num_kernels;
    const bool sums = at.op == Op::kWgrad || at.op == Op::kBulkReduceScatter;
    std::vector<RankCall> place(calls_.size());
    for (size_t rank = 0; rank < calls_.size(); ++rank) {
      const auto mirror = [&](const Tensor& like, DType kind) {
        Tensor tensor = like;
        tensor.dtype = kind;
        memory_.push_back(gpus_.New(ordinals_[rank], tensor.size_bytes() + offset));
        tensor.data = reinterpret_cast<std::byte*>(memory_.back().get() + offset);
        return tensor;
      };
      for (size_t i = 0; i < calls_[rank].operands.size(); ++i) {
        const bool is_main_grad = sums && at.accumulate && i > n && i <= 2 * n;
        place[rank].operands.push_back(mirror(
            calls_[rank].operands[i], is_main_grad ? DType::kF32 : DTypeOfOperand(i)));
      }
      for (size_t i = 0; i < NumScales(at); ++i) {
        const Tensor shape = ShapeOfScales(calls_[rank], i);
        const Tensor scales = mirror(shape, shape.dtype);
        place[rank].scales.push_back(scales);
        for (int64_t e = 0; e < scales.num_elements(); ++e) {
          const float factor = (static_cast<int64_t>(rank) + e) % 3 == 0 ? 2.0f : 1.0f;
          Set(scales, e, ScaleOfOperand(i) * (at.has_row_scales ? factor : 1.0f));
        }
      }
      for (size_t i = 0; i < calls_[rank].results.size(); ++i) {
        const bool is_dw = sums && at.accumulate && i < n;
        const bool is_gathered = at.op == Op::kAllGatherMatmul && i == n;
        place[rank].results.push_back(
            mirror(calls_[rank].results[i],
                   is_dw ? DType::kF32 : DTypeOfOperand(is_gathered ? 0 : kNoFactor)));
        if (!is_gathered || !at.has_row_scales) continue;
        Tensor scales = place[rank].scales[0];
        scales.rows *= at.num_ranks;
        place[rank].results.push_back(mirror(scales, scales.dtype));
      }
      if (at.devices.empty()) continue;
      memory_.push_back(gpus_.New(ordinals_[rank], sizeof(uint32_t)));
      place[rank].partition = reinterpret_cast<const uint32_t*>(memory_.back().get());
    }
    return place;
  }

  // Returns the number of activations that the GEMMs multiply; kernels or gradients of
  // results follow.
  size_t NumFirstFactors() const {
    const GemmKind gemm = InfoOf(site.attributes().op).gemm;
    const bool has_pairs = gemm == GemmKind::kPairSum || gemm == GemmKind::kDgrad;
    return has_pairs ? site.attributes().num_kernels : 1;
  }
  DType DTypeOfOperand(size_t i) const {
    if (!IsFp8(dtype_)) return dtype_;
    if (i >= NumScales(site.attributes())) return DType::kBF16;
    return i < NumFirstFactors() ? DType::kE4M3 : dtype_;
  }
  Tensor ShapeOfScales(const RankCall& call, size_t i) const {
    const CallAttributes& at = site.attributes();
    const Tensor& of = call.operands[i];
    if (!at.has_row_scales) return {DType::kF32, 1, 1, 1, nullptr};
    const bool is_of_rows = i < NumFirstFactors() || at.rhs_transposed ||
                            InfoOf(at.op).gemm == GemmKind::kWgrad;
    if (has_blocks_) {
      const int64_t rows = is_of_rows ? of.rows : of.rows / 32;
      const int64_t features = is_of_rows ? of.features / 32 : of.features;
      return {DType::kE8M0, of.batch, rows, features, nullptr};
    }
    if (is_of_rows) return {DType::kF32, of.batch, of.rows, 1, nullptr};
    return {DType::kF32, 1, 1, of.features, nullptr};
  }
  // Returns the (smallest) scale of an FP8 operand. The product of two of them is not 1.
  // Each pair (x_i, w_i) and each gradient dy_i has a different scale.
  float ScaleOfOperand(size_t i) const {
    const size_t n = NumFirstFactors();
    return i < n ? std::ldexp(0.5f, static_cast<int>(i))
                 : std::ldexp(4.0f, static_cast<int>(i - n));
  }

  static std::vector<int> OrdinalsOf(const CallAttributes& at,
                                     const Placement& placement) {
    std::vector<int> ordinals = placement.ordinals;
    for (int r = 0; placement.ordinals.empty() && r < at.num_ranks; ++r) {
      ordinals.push_back(r);
    }
    return ordinals;
  }
  static std::vector<int> LocalRanksOf(const CallAttributes& at,
                                       const Placement& placement) {
    std::vector<int> ranks = placement.local_ranks;
    for (int r = 0; placement.local_ranks.empty() && r < at.num_ranks; ++r) {
      ranks.push_back(r);
    }
    return ranks;
  }
  static CallAttributes PlacedAt(CallAttributes at, const Placement& placement) {
    if (at.ranks.empty()) return at;
    const std::vector<int> ordinals = OrdinalsOf(at, placement);
    at.ranks = placement.ranks;
    at.devices = placement.devices;
    if (at.ranks.empty()) at.ranks.assign(ordinals.begin(), ordinals.end());
    return at;
  }

  // Returns the scale of element e of an FP8 array.
  static float ScaleAt(const Tensor& scales, const Tensor& of, int64_t e) {
    if (scales.num_elements() == 1) return Get(scales, 0);
    const int64_t row = e / of.features;  // counted through all batches
    const int64_t scale_row = row / (of.rows / scales.rows);
    const int64_t feature = e % of.features / (of.features / scales.features);
    return Get(scales, scale_row * scales.features + feature);
  }

  static float Get(const Tensor& tensor, int64_t e) {
    return Read(tensor.data + e * SizeOf(tensor.dtype), tensor.dtype);
  }
  static void Set(const Tensor& tensor, int64_t e, float value) {
    Write(tensor.data + e * SizeOf(tensor.dtype), tensor.dtype, value);
  }

  void Load() {
    for (size_t rank = 0; rank < calls_.size(); ++rank) {
      for (size_t i = 0; i < calls_[rank].operands.size(); ++i) {
        const Tensor& to = on_device_[rank].operands[i];
        const auto* from =
            reinterpret_cast<const float*>(calls_[rank].operands[i].data);
        for (int64_t e = 0; e < to.num_elements(); ++e) {
          const bool is_scaled = IsFp8(to.dtype);
          Set(to, e,
              from[e] / (is_scaled ? ScaleAt(on_device_[rank].scales[i], to, e) : 1));
        }
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
    for (Tensor& tensor : call.scales) tensor.data = nullptr;
    return call;
  }

  Gpus& gpus_;
  const std::vector<int> ordinals_;
  const std::vector<int> local_ranks_;

 public:
  CudaCallSite site;

 private:
  static constexpr size_t kNoFactor = -1;

  const jax_ub_test::Sizes sizes_;
  std::unique_ptr<jax_ub_test::Arrays> arrays_;
  std::vector<RankCall> calls_;
  const DType dtype_;
  const bool has_blocks_;
  std::vector<std::vector<RankCall>> places_;
  std::vector<RankCall> on_device_;
  std::vector<DeviceMemory> memory_;
};

inline std::string NameOf(const CallAttributes& at) {
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

}  // namespace jax_ub
