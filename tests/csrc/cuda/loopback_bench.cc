// loopback_bench [FILE.json [LIBRARY DIRECTORY ...]]: overlapped calls of one rank of eight
// on one GPU. The heaps of all peers are this rank's own heap: its puts fill its own slots,
// and its signals end its own waits. So a whole call runs with all of its launches, and no
// peer shares the GPU. Results are meaningless, and a put moves data within the GPU, by
// kernels of the driver instead of copy engines.
//
//   launches   calls of few tokens, whose GEMMs take no time
//   layers     calls of Llama 3 70B with 8192 tokens against the GEMM of all rows, for
//              lanes and multiprocessors that GEMMs leave free
//
// Times are medians of kRounds rounds in which what is compared takes turns. Replayed calls
// are captured in a graph, as XLA's command buffers do.

#include <algorithm>
#include <numeric>
#include <string>
#include <vector>

#include "cuda/gpu_bench.h"
#include "engine/cuda/dry_run_device.h"
#include "engine/cuda/one_kernel_reduce.h"
#include "engine/cuda/stream_device.h"
#include "engine/executor.h"
#include "transport/cuda/cuda_slots.h"
#include "transport/cuda/heap.h"

namespace jax_ub {

namespace {

constexpr int kRanks = 8;
constexpr double kTimeoutS = 2;

// A linear layer whose GEMM has M x K x N elements on each rank.
struct Layer {
  std::string name;
  Op op;
  int64_t m, k, n;
  Variant variant = Variant::kPlain;
};

class LoopbackBench : public GpuBench {
 public:
  LoopbackBench(const Driver& driver, const CublasLt& library)
      : GpuBench(driver, library),
        error_(driver, sizeof(ErrorRecord)),
        heap_(driver, HeapLayout(kSlotsBytes).size_bytes()),
        workspace_(driver, kWorkspaceBytes) {
    Check(driver,
          driver.MemsetD8Async(heap_.get(), 0, HeapLayout::flags_bytes(), stream(0)),
          "cuMemsetD8Async");
    Synchronize();
    // Slots are numbered by distance, so a put to a peer is this rank's own slot of the
    // peer at that distance. Flags that are indexed by rank are shifted to the peer's.
    const RankSlotAddress own = HeapLayout::AddressAt(heap_.get());
    for (int peer = 0; peer < kRanks; ++peer) {
      RankSlotAddress address = own;
      address.freed += peer * kFlagLineBytes;
      address.announced += peer * kFlagLineBytes;
      addresses_.push_back(address);
    }
  }

  void Run() {
    for (const int64_t m : {int64_t{64}, int64_t{1024}}) {
      for (const Op op :
           {Op::kAllGatherMatmul, Op::kMatmulReduceScatter, Op::kMatmulAllReduce}) {
        Launches({NameOf(op), op, m, 128, 128});
      }
      Launches({"GEMM+AR in one exchange", Op::kMatmulAllReduce, m, 128, 128,
                Variant::kOneShot});
    }
    Options({"AG+GEMM 70B qkv", Op::kAllGatherMatmul, 8192, 8192, 1280});
    Options({"AG+GEMM 70B fc1", Op::kAllGatherMatmul, 8192, 8192, 7168});
    Options({"GEMM+RS 70B proj", Op::kMatmulReduceScatter, 8192, 1024, 8192});
    Options({"GEMM+RS 70B fc2", Op::kMatmulReduceScatter, 8192, 3584, 8192});
    Options({"GEMM+AR 70B proj", Op::kMatmulAllReduce, 8192, 1024, 8192});
  }

 private:
  static constexpr int64_t kSlotsBytes = 1024 * kMiB;
  static constexpr int64_t kWorkspaceBytes = 1536 * kMiB;

  // A call with its operands, which stay in memory.
  struct Call {
    CallAttributes attributes;
    RankCall call;
    CallPlan plan;
    GemmOptions options;
    std::vector<DeviceMemory> memory;
  };

  static std::string NameOf(Op op) {
    return op == Op::kAllGatherMatmul       ? "AG+GEMM"
           : op == Op::kMatmulReduceScatter ? "GEMM+RS"
                                            : "GEMM+AR";
  }

  Call MakeCall(const Layer& layer, const KernelOptions& kernel_options = {}) {
    Call made;
    CallAttributes& at = made.attributes;
    at.op = layer.op;
    at.method = Method::kRingExchange;
    at.variant = layer.variant;
    at.num_ranks = kRanks;
    at.ranks.resize(kRanks);
    std::iota(at.ranks.begin(), at.ranks.end(), 0);
    at.label = layer.name;
    at.kernel_options = kernel_options;
    const auto add = [&](std::vector<Tensor>& tensors, int64_t rows, int64_t features) {
      made.memory.push_back(RandomMemory(2 * rows * features));
      tensors.push_back({DType::kBF16, 1, rows, features,
                         reinterpret_cast<std::byte*>(made.memory.back().get())});
    };
    const bool gathers = layer.op == Op::kAllGatherMatmul;
    const bool scatters = layer.op == Op::kMatmulReduceScatter;
    add(made.call.operands, gathers ? layer.m / kRanks : layer.m, layer.k);
    add(made.call.operands, layer.k, layer.n);
    add(made.call.results, scatters ? layer.m / kRanks : layer.m, layer.n);
    CheckCall(at, made.call);
    if (kernel_options.sm_margin > 0) {
      made.options.sm_target = gpu_.num_sms() - kernel_options.sm_margin;
    }
    made.plan = PlanCall(at, made.call, 0, [&](Lane, const GemmProblem& problem) {
      gpu_.gemm().Prepare(problem, made.options,
                          {workspace_.get(), CudaGemm::WorkspaceBytes(problem)});
    });
    const SlotRequirements& slots = made.plan.slots;
    if (slots.num_slots * CudaSlots::StrideOf(slots.slot_bytes) > kSlotsBytes ||
        made.plan.workspace.size_bytes() > kWorkspaceBytes) {
      throw Error(layer.name + " needs more memory than the benchmark has");
    }
    return made;
  }

  void Execute(const Call& made) {
    const CallAttributes& at = made.attributes;
    const SlotRequirements& slots = made.plan.slots;
    StreamDevice device(gpu_.resources(), stream(0),
                        &gpu_.lanes().Find(at.kernel_options), at.kernel_options,
                        made.options, made.plan.workspace,
                        {workspace_.get(), kWorkspaceBytes});
    CudaSlots transport(0, addresses_, error_.device(), {.number = 1, .tag = 1},
                        {slots.num_slots, slots.slot_bytes},
                        {.driver = &driver_,
                         .flags = &gpu_.flags(),
                         .sums = &gpu_.sums(),
                         .stream = device.stream(kCommunicationLane),
                         .copies = device.copies(),
                         .all_reduce = &gpu_.all_reduce()});
    if (ReducesInOneKernel(at, slots)) {
      ReduceInOneKernel(at, made.call, slots, kTimeoutS, transport, device);
    } else {
      ExecuteRank(at, made.call, slots, kTimeoutS, transport, device, {});
    }
    device.Gather();
    std::vector<NanFill::Result> results;
    for (const Tensor& tensor : made.call.results) {
      results.push_back({reinterpret_cast<uint64_t>(tensor.data),
                         static_cast<uint64_t>(tensor.size_bytes())});
    }
    transport.Finish(results);
    device.Join();
  }

  void CheckNoFailure(const std::string& name) {
    Synchronize();
    const auto* record = static_cast<const ErrorRecord*>(error_.get());
    if (record->code == ErrorRecord::kNone) return;
    throw Error(name + ": a wait failed: code " + std::to_string(record->code) +
                ", peer " + std::to_string(record->peer) + ", slot " +
                std::to_string(static_cast<int>(record->slot)));
  }

  // Enqueues a GEMM with the operands of a call, of all rows.
  GemmProblem ProductOf(const Layer& layer, const std::vector<DeviceMemory>& memory) {
    return Product(layer.m, layer.n, layer.k, memory[0].get(), memory[1].get(),
                   memory[2].get());
  }

  void Launches(const Layer& layer) {
    const Call call = MakeCall(layer);
    const std::vector<Enqueue> programs = {[&] { Execute(call); }};
    const std::string text = layer.name + " of " + std::to_string(layer.m) +
                             " tokens, P=" + std::to_string(kRanks);
    Show(text + ", enqueued, us", Times(programs)[0]);
    Show(text + ", replayed, us", ReplayTimes(programs)[0]);
    CheckNoFailure(layer.name);
  }

  // Measures a layer's call over its GEMM, and GEMMs in chunks over it.
  void Options(const Layer& layer) {
    std::vector<DeviceMemory> memory;
    for (const int64_t size :
         {layer.m * layer.k, layer.k * layer.n, layer.m * layer.n}) {
      memory.push_back(RandomMemory(2 * size));
    }
    const GemmProblem whole = ProductOf(layer, memory);
    std::vector<Call> calls;
    std::vector<std::string> names;
    for (const int num_lanes : {1, 2, 3}) {
      for (const int margin : {0, 2, 4, 8}) {
        for (const bool use_ce : {true, false}) {
          if (!use_ce && (num_lanes != 2 || margin != 4)) continue;
          KernelOptions options;
          options.num_lanes = num_lanes;
          options.sm_margin = margin;
          options.use_ce = use_ce;
          calls.push_back(MakeCall(layer, options));
          names.push_back(std::to_string(num_lanes) + " lanes, margin " +
                          std::to_string(margin) + (use_ce ? "" : ", by kernels"));
        }
      }
    }
    std::vector<Enqueue> programs = {[&] { Multiply(whole, 0); }};
    for (const Call& call : calls) programs.push_back([&] { Execute(call); });
    const std::vector<double> times = ReplayTimes(programs);
    CheckNoFailure(layer.name);
    Show(layer.name + ", P=" + std::to_string(kRanks) + ", the GEMM alone, us",
         times[0]);
    for (size_t i = 0; i < names.size(); ++i) {
      Show(layer.name + ", call over GEMM, " + names[i], times[1 + i] / times[0]);
    }
  }

  HostMemory error_;
  DeviceMemory heap_;
  DeviceMemory workspace_;
  std::vector<RankSlotAddress> addresses_;  // [peer]
};

}  // namespace

}  // namespace jax_ub

int main(int argc, char** argv) {
  return jax_ub::RunGpuBench<jax_ub::LoopbackBench>("loopback_bench", argc, argv);
}
