// Tests the FFI handlers of the CUDA engine as XLA calls them, on emulated GPUs.
#include "ffi/cuda/handlers.h"

#include <cuda.h>

#include <algorithm>
#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "check.h"
#include "cuda/emulated_cublaslt.h"
#include "cuda/emulated_driver.h"
#include "cuda/ffi/xla_call.h"
#include "engine/cuda/cuda_engine.h"
#include "platform/cuda/owners.h"

namespace jax_ub {

namespace {

// The call: y [2, 3] are the rank's rows of the sum over two ranks of x [4, 2] w [2,
// 3].
constexpr int kRanks = 2;
constexpr int64_t kRows = 4, kInner = 2, kColumns = 3;
constexpr int64_t kOwnRows = kRows / kRanks;

std::map<std::string, XlaAttribute> AttributesOfTheCall() {
  return {{"channel", ""},
          {"has_bias", int64_t{0}},
          {"has_residual", int64_t{0}},
          {"label", "matmul_reduce_scatter"},
          {"method", int64_t{1}},
          {"num_pairs", int64_t{1}},
          {"num_ranks", int64_t{kRanks}},
          {"num_splits", int64_t{0}},
          {"ranks", std::vector<int64_t>{40, 41}},
          {"rhs_transposed", int64_t{0}},
          {"scale", 1.0f},
          {"sm_margin", int64_t{2}}};
}

std::map<std::string, XlaAttribute> With(const std::string& name, XlaAttribute value) {
  auto attributes = AttributesOfTheCall();
  attributes[name] = std::move(value);
  return attributes;
}

Target ReduceScatterTarget() {
  for (const Target& target : CudaTargets(false)) {
    if (target.name == "jax_ub$matmul_reduce_scatter") return target;
  }
  return {};
}

const std::vector<XlaArray> kOperands = {{XLA_FFI_DataType_F32, {kRows, kInner}},
                                         {XLA_FFI_DataType_F32, {kInner, kColumns}}};

int64_t WorkspaceBytes() {
  jax_ub::CallAttributes at;
  at.op = Op::kMatmulReduceScatter;
  at.method = Method::kRingExchange;
  at.num_ranks = kRanks;
  at.ranks = {40, 41};
  at.label = "matmul_reduce_scatter";
  const RankCall call = {
      .operands = {{DType::kF32, 1, kRows, kInner}, {DType::kF32, 1, kInner, kColumns}},
      .results = {{DType::kF32, 1, kOwnRows, kColumns}}};
  return CudaEngine::WorkspaceBytes(at, call);
}

std::vector<XlaArray> Results(XLA_FFI_DataType workspace = XLA_FFI_DataType_U8) {
  return {{XLA_FFI_DataType_F32, {kOwnRows, kColumns}},
          {workspace, {WorkspaceBytes()}}};
}

// A process with two GPUs, whose ids are 40 and 41, and the arrays of one rank on each.
class Process {
 public:
  explicit Process(double timeout_s = 60)
      : machine_({.num_devices = kRanks}),
        engine_(new CudaEngine(EmulatedDriver(), EmulatedCublasLt(), timeout_s)) {
    engine_->set_local_devices({{0, 40}, {1, 41}});
    ReplaceCudaEngine(engine_.get());
    for (int rank = 0; rank < kRanks; ++rank) {
      contexts_.emplace_back(driver, rank);
      const ScopedContext current(driver, contexts_.back().get());
      streams_.emplace_back(driver);
      for (const int64_t count :
           {kRows * kInner, kInner * kColumns, kOwnRows * kColumns}) {
        memory_.emplace_back(driver, count * sizeof(float));
      }
      memory_.emplace_back(driver, WorkspaceBytes());
      partitions_.emplace_back(driver, sizeof(uint32_t));
    }
    Fill(1);
    SetPartitions({0, 1});
  }
  ~Process() { ReplaceCudaEngine(nullptr); }

  // Fills the operands with numbers that depend on `seed`.
  void Fill(int seed) {
    for (int rank = 0; rank < kRanks; ++rank) {
      float* x = At(rank, 0);
      for (int64_t i = 0; i < kRows * kInner; ++i) x[i] = (i * seed + rank) % 5 - 2;
      float* w = At(rank, 1);
      for (int64_t i = 0; i < kInner * kColumns; ++i) w[i] = (i + 2 * rank) % 4 - 1;
    }
  }

  // Writes the number of each rank's partition, as XLA does before a call of an
  // exported program.
  void SetPartitions(const std::vector<uint32_t>& partitions) {
    for (int rank = 0; rank < kRanks; ++rank) {
      *reinterpret_cast<uint32_t*>(partitions_[rank].get()) = partitions[rank];
    }
  }

  void CheckResults() {
    for (int rank = 0; rank < kRanks; ++rank) Synchronize(rank);
    for (int rank = 0; rank < kRanks; ++rank) {
      for (int64_t row = 0; row < kOwnRows; ++row) {
        for (int64_t column = 0; column < kColumns; ++column) {
          float sum = 0;
          for (int peer = 0; peer < kRanks; ++peer) {
            for (int64_t k = 0; k < kInner; ++k) {
              sum += At(peer, 0)[(rank * kOwnRows + row) * kInner + k] *
                     At(peer, 1)[k * kColumns + column];
            }
          }
          CHECK_EQ(At(rank, 2)[row * kColumns + column], sum);
        }
      }
    }
  }

  void CheckEnd() {
    ReplaceCudaEngine(nullptr);
    engine_.reset();
    {
      // Freeing memory needs a current context, of any device.
      const ScopedContext current(driver, contexts_[0].get());
      memory_.clear();
      partitions_.clear();
    }
    streams_.clear();
    contexts_.clear();
    CHECK_EQ(machine_.Complaints(), "");
  }

  float* At(int rank, int array) {
    return reinterpret_cast<float*>(memory_[4 * rank + array].get());
  }
  std::vector<CUdeviceptr> addresses(int rank) const {
    std::vector<CUdeviceptr> found;
    for (int i = 0; i < 4; ++i) found.push_back(memory_[4 * rank + i].get());
    return found;
  }
  std::vector<CUdeviceptr> exported_addresses(int rank) const {
    std::vector<CUdeviceptr> found = addresses(rank);
    found.insert(found.begin() + 2, partitions_[rank].get());
    return found;
  }
  CUcontext context(int rank) const { return contexts_[rank].get(); }
  CUstream stream(int rank) const { return streams_[rank].get(); }
  void Synchronize(int rank) {
    const ScopedContext current(driver, contexts_[rank].get());
    CHECK_EQ(driver.StreamSynchronize(stream(rank)), CUDA_SUCCESS);
  }

  const Driver& driver = EmulatedDriver();

 private:
  EmulatedMachine machine_;
  std::unique_ptr<CudaEngine> engine_;
  std::vector<Context> contexts_;
  std::vector<Stream> streams_;
  std::vector<DeviceMemory> memory_;
  std::vector<DeviceMemory> partitions_;
};

void CheckOk(const XlaOutcome& outcome) {
  CHECK_EQ(outcome.message, "");
  CHECK_EQ(outcome.code, XLA_FFI_Error_Code_OK);
}

void CheckError(const XlaOutcome& outcome,
                XLA_FFI_Error_Code code,
                const std::string& text) {
  CHECK_EQ(outcome.code, code);
  if (outcome.message.find(text) == std::string::npos) {
    check::Fail(__FILE__, __LINE__, "'", text, "' is not in: ", outcome.message);
  }
}

std::unique_ptr<XlaCall> NewCall() {
  return std::make_unique<XlaCall>(ReduceScatterTarget(), TheCudaCallSiteType(),
                                   AttributesOfTheCall(), kOperands, Results());
}

TEST(HandlersRunACallOfTwoRanks) {
  Process process;
  {
    const auto call = NewCall();
    CheckOk(call->Instantiate());
    for (int run = 1; run <= 3; ++run) {
      process.Fill(run);
      for (int rank = 0; rank < kRanks; ++rank) {
        CheckOk(call->Initialize(rank, process.addresses(rank)));
      }
      for (int rank = 0; rank < kRanks; ++rank) {
        CheckOk(call->Execute(rank, process.stream(rank), process.addresses(rank)));
      }
      process.CheckResults();
    }
  }
  process.CheckEnd();
}

TEST(HandlersAreCapturedAndReplayedWithoutThem) {
  Process process;
  const Driver& driver = process.driver;
  {
    const auto call = NewCall();
    CheckOk(call->Instantiate());
    std::vector<CUgraphExec> graphs(kRanks);
    for (int rank = 0; rank < kRanks; ++rank) {
      CheckOk(call->Initialize(rank, process.addresses(rank)));
      const ScopedContext current(driver, process.context(rank));
      CHECK_EQ(driver.StreamBeginCapture(process.stream(rank),
                                         CU_STREAM_CAPTURE_MODE_THREAD_LOCAL),
               CUDA_SUCCESS);
      CheckOk(call->Execute(rank, process.stream(rank), process.addresses(rank)));
      CUgraph graph = nullptr;
      CHECK_EQ(driver.StreamEndCapture(process.stream(rank), &graph), CUDA_SUCCESS);
      CHECK_EQ(driver.GraphInstantiate(&graphs[rank], graph, 0), CUDA_SUCCESS);
      CHECK_EQ(driver.GraphDestroy(graph), CUDA_SUCCESS);
    }
    for (int run = 1; run <= 3; ++run) {
      process.Fill(run);
      for (int rank = 0; rank < kRanks; ++rank) {
        CheckOk(call->Initialize(rank, process.addresses(rank)));
        const ScopedContext current(driver, process.context(rank));
        CHECK_EQ(driver.GraphLaunch(graphs[rank], process.stream(rank)), CUDA_SUCCESS);
      }
      process.CheckResults();
    }
    for (CUgraphExec graph : graphs) {
      CHECK_EQ(driver.GraphExecDestroy(graph), CUDA_SUCCESS);
    }
  }
  process.CheckEnd();
}

TEST(AFailureOfTheDeviceFailsTheNextRun) {
  Process process(0.3);
  {
    const auto call = NewCall();
    CheckOk(call->Instantiate());
    CheckOk(call->Initialize(0, process.addresses(0)));
    CheckOk(call->Initialize(1, process.addresses(1)));
    // The other rank does not make the call.
    CheckOk(call->Execute(0, process.stream(0), process.addresses(0)));
    process.Synchronize(0);
    CHECK(process.At(0, 2)[0] != process.At(0, 2)[0]);  // NaN
    const std::string text = "matmul_reduce_scatter";
    CheckError(call->Initialize(0, process.addresses(0)),
               XLA_FFI_Error_Code_DEADLINE_EXCEEDED, text);
    CheckError(call->Execute(0, process.stream(0), process.addresses(0)),
               XLA_FFI_Error_Code_DEADLINE_EXCEEDED, text);
  }
  process.CheckEnd();
}

std::unique_ptr<XlaCall> NewExportedCall(XlaArray partition) {
  std::vector<XlaArray> operands = kOperands;
  operands.push_back(std::move(partition));
  return std::make_unique<XlaCall>(ReduceScatterTarget(), TheCudaCallSiteType(),
                                   With("devices", std::vector<int64_t>{40, 41}),
                                   operands, Results());
}

TEST(AnExportedProgramEndsWithItsPartitionWhichTheDeviceReads) {
  Process process;
  {
    const auto call = NewExportedCall({XLA_FFI_DataType_U32, {}});
    CheckOk(call->Instantiate());
    const auto run = [&](bool misplaced) {
      for (int rank = 0; rank < kRanks; ++rank) {
        CheckOk(call->Initialize(rank, process.exported_addresses(rank)));
      }
      for (int rank = 0; rank < kRanks; ++rank) {
        // The call of the other rank may have failed already.
        static_cast<void>(call->Execute(rank, process.stream(rank),
                                        process.exported_addresses(rank)));
        if (misplaced) process.Synchronize(rank);
      }
    };
    run(false);
    process.CheckResults();
    process.SetPartitions({1, 0});
    run(true);
    CHECK(process.At(0, 2)[0] != process.At(0, 2)[0]);  // NaN
    for (int rank = 0; rank < kRanks; ++rank) {
      CheckError(call->Initialize(rank, process.exported_addresses(rank)),
                 XLA_FFI_Error_Code_ABORTED,
                 "the program was lowered for export for the devices [40, 41] in that "
                 "order, and is called on them in another");
    }
  }
  process.CheckEnd();
}

TEST(AnExportedProgramWithoutItsPartitionIsRefused) {
  Process process;
  {
    for (const XlaArray& other :
         {XlaArray{XLA_FFI_DataType_F32, {}}, XlaArray{XLA_FFI_DataType_U32, {1}}}) {
      const auto call = NewExportedCall(other);
      CheckOk(call->Instantiate());
      CheckError(call->Initialize(0, process.exported_addresses(0)),
                 XLA_FFI_Error_Code_INVALID_ARGUMENT,
                 "its last operand is no partition");
    }
  }
  process.CheckEnd();
}

TEST(HandlersRefuseWhatTheyCannotRead) {
  const auto instantiate = [](std::map<std::string, XlaAttribute> attributes) {
    XlaCall call(ReduceScatterTarget(), TheCudaCallSiteType(), std::move(attributes),
                 kOperands, Results());
    return call.Instantiate();
  };
  CheckError(instantiate(With("num_ranks", int64_t{0})),
             XLA_FFI_Error_Code_INVALID_ARGUMENT,
             "attribute num_ranks is 0, expected 1 to 65536");
  CheckError(instantiate(With("num_lanes", int64_t{9})),
             XLA_FFI_Error_Code_INVALID_ARGUMENT, "attribute num_lanes is 9");
  CheckError(instantiate(With("scale", "one")), XLA_FFI_Error_Code_INVALID_ARGUMENT,
             "attribute scale: ");
  CheckError(instantiate(With("method", int64_t{0})), XLA_FFI_Error_Code_UNIMPLEMENTED,
             "direct");
}

TEST(HandlersRefuseAWorkspaceThatIsNone) {
  Process process;
  {
    XlaCall call(ReduceScatterTarget(), TheCudaCallSiteType(), AttributesOfTheCall(),
                 kOperands, Results(XLA_FFI_DataType_S8));
    CheckOk(call.Instantiate());
    CheckError(call.Execute(0, process.stream(0), process.addresses(0)),
               XLA_FFI_Error_Code_INVALID_ARGUMENT, "its last result is no workspace");
    XlaCall bare(ReduceScatterTarget(), TheCudaCallSiteType(), AttributesOfTheCall(),
                 kOperands, {});
    CheckOk(bare.Instantiate());
    CheckError(bare.Initialize(0, process.addresses(0)),
               XLA_FFI_Error_Code_INVALID_ARGUMENT, "the workspace is missing");
  }
  process.CheckEnd();
}

TEST(OnlyExecuteOfAProcessWithOneDeviceIsForCommandBuffers) {
  const CallSiteType type = TheCudaCallSiteType();
  static_cast<XLA_FFI_TypeId*>(type.type_id)->type_id = 7;
  for (const bool has_several_devices : {false, true}) {
    for (const Target& target : CudaTargets(has_several_devices)) {
      const XLA_FFI_Metadata execute = XlaCall::MetadataOf(target.execute);
      const bool is_captured =
          execute.traits == XLA_FFI_HANDLER_TRAITS_COMMAND_BUFFER_COMPATIBLE;
      CHECK_EQ(is_captured, !has_several_devices);
      CHECK_EQ(execute.api_version.minor_version, XlaFfiApiVersion().second);
      CHECK_EQ(XlaCall::MetadataOf(target.initialize).traits, 0u);
      CHECK_EQ(XlaCall::MetadataOf(target.instantiate).state_type_id.type_id, 7);
    }
  }
}

}  // namespace

}  // namespace jax_ub

CHECK_MAIN()
