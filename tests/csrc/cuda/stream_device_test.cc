// Tests a rank's call on streams: how it divides its workspace, in which order lanes
// run, and which lanes it may use during a capture.
#include "engine/cuda/stream_device.h"

#include <cstring>
#include <string>
#include <vector>

#include "check.h"
#include "cuda/emulated_cublaslt.h"
#include "cuda/emulated_driver.h"
#include "engine/cuda/gpu.h"

namespace jax_ub {
namespace {

// A GPU with the resources of the engine, and XLA's stream.
struct OneGpu {
  explicit OneGpu(int max_delay_us = 0)
      : machine({.seed = 3, .max_delay_us = max_delay_us}),
        gpu(EmulatedDriver(), EmulatedCublasLt(), 0),
        current(EmulatedDriver(), gpu.context()),
        stream(EmulatedDriver()),
        other_stream(EmulatedDriver()),
        memory(EmulatedDriver(), 1 << 20) {}

  void Synchronize() {
    CHECK_EQ(EmulatedDriver().StreamSynchronize(stream.get()), CUDA_SUCCESS);
  }
  StreamDevice DeviceOn(StreamLanes& lanes,
                        const WorkspacePlan& plan,
                        const KernelOptions& kernel_options = {}) {
    return {gpu.resources(),
            stream.get(),
            &lanes,
            kernel_options,
            {},
            plan,
            {memory.get(), memory.size_bytes()}};
  }
  void BeginCapture(const Stream& which) {
    CHECK_EQ(EmulatedDriver().StreamBeginCapture(which.get(),
                                                 CU_STREAM_CAPTURE_MODE_THREAD_LOCAL),
             CUDA_SUCCESS);
  }
  void EndCapture(const Stream& which) {
    CUgraph graph = nullptr;
    CHECK_EQ(EmulatedDriver().StreamEndCapture(which.get(), &graph), CUDA_SUCCESS);
    CHECK_EQ(EmulatedDriver().GraphDestroy(graph), CUDA_SUCCESS);
  }

  EmulatedMachine machine;
  Gpu gpu;
  ScopedContext current;
  Stream stream;
  Stream other_stream;
  DeviceMemory memory;
};

WorkspacePlan PlanOf(int num_lanes, int64_t scratch_bytes, int64_t tensor_bytes) {
  WorkspacePlan plan;
  plan.scratch_bytes.assign(1 + num_lanes, scratch_bytes);
  plan.scratch_bytes[0] = 0;
  plan.tensor_bytes = tensor_bytes;
  return plan;
}

TEST(TensorsFollowTheScratchOfTheLanesAndDoNotOverlap) {
  OneGpu one;
  StreamLanes lanes(EmulatedDriver(), {});
  const WorkspacePlan plan = PlanOf(2, 512, 768);
  CHECK_EQ(plan.size_bytes(), 2 * 512 + 768 + WorkspacePlan::kAlignment);
  StreamDevice device = one.DeviceOn(lanes, plan);
  const Tensor first = device.Allocate(DType::kF32, 1, 3, 5);
  const Tensor second = device.Allocate(DType::kBF16, 2, 4, 32);
  const auto begin = reinterpret_cast<CUdeviceptr>(first.data);
  CHECK_EQ(begin % WorkspacePlan::kAlignment, 0u);
  CHECK(begin >= one.memory.get() + 2 * 512);
  CHECK_EQ(second.data - first.data, 256);
  CHECK(reinterpret_cast<CUdeviceptr>(second.data) + second.size_bytes() <=
        one.memory.get() + plan.size_bytes());
  CHECK_THROWS(device.Allocate(DType::kF32, 1, 1, 1), "more than was planned");
  device.Gather();
  device.Join();
  CHECK_THROWS(one.DeviceOn(lanes, PlanOf(2, 1 << 20, 0)), "the workspace has 1048576");
  one.Synchronize();
}

// Each lane adds a step to the result of the previous lane; any other order gives a
// smaller number.
TEST(EventsOrderLanesAndJoinOrdersXlasStream) {
  OneGpu one(200);
  StreamLanes lanes(EmulatedDriver(), {.num_lanes = 3});
  constexpr int64_t kSteps = 40;
  auto* const values = reinterpret_cast<uint32_t*>(one.memory.get());
  for (int64_t i = 0; i <= kSteps; ++i) values[i] = 100 + i;
  const auto at = [&](int64_t i) { return reinterpret_cast<std::byte*>(values + i); };
  StreamDevice device = one.DeviceOn(lanes, {}, {.num_lanes = 3});
  EventId mark = kNoEvent;
  for (int64_t step = 0; step < kSteps; ++step) {
    const Lane lane = step % 4;
    device.Await(lane, mark);
    device.Copy(lane, {at(step), 1, 4, 4}, at(step + 1), 4);
    mark = device.Record(lane);
  }
  device.Gather();
  device.Join();
  CHECK_EQ(
      EmulatedDriver().MemcpyAsync(one.memory.get() + 4 * (kSteps + 1),
                                   one.memory.get() + 4 * kSteps, 4, one.stream.get()),
      CUDA_SUCCESS);
  one.Synchronize();
  CHECK_EQ(values[kSteps + 1], 100u);
}

// The emulated version of cuBLASLt is 13.0.
TEST(ProductsRunInTurnWhereTheirKernelsCorruptOthers) {
  for (const int major : {9, 10, 11, 12}) {
    const EmulatedMachine machine(
        {.attributes = {{CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR, major}}});
    Gpu gpu(EmulatedDriver(), EmulatedCublasLt(), 0);
    const ScopedContext current(EmulatedDriver(), gpu.context());
    StreamLanes& lanes = gpu.lanes().Find({.num_lanes = 3});
    const bool in_turn = major == 10 || major == 11;
    CHECK_EQ(lanes.num_product_lanes(), 3);
    CHECK(lanes.stream(0) != lanes.stream(1));
    CHECK_EQ(lanes.stream(1) == lanes.stream(2), in_turn);
    CHECK_EQ(lanes.stream(1) == lanes.stream(3), in_turn);
    CublasLt mended = EmulatedCublasLt();
    mended.version = 130200;
    CHECK(!MayCorruptConcurrentGemms(mended, major));
  }
}

TEST(RowsAreCopiedByEnginesOrByKernels) {
  for (const bool use_ce : {true, false}) {
    OneGpu one;
    StreamLanes lanes(EmulatedDriver(), {});
    auto* const bytes = reinterpret_cast<uint8_t*>(one.memory.get());
    for (int i = 0; i < 64; ++i) bytes[i] = static_cast<uint8_t>(i);
    std::memset(bytes + 64, 0, 128);
    const auto at = [&](int i) { return reinterpret_cast<std::byte*>(bytes + i); };
    StreamDevice device = one.DeviceOn(lanes, {}, {.use_ce = use_ce});
    device.Copy(0, {at(0), 4, 6, 16}, at(64), 10);
    device.Copy(1, {at(0), 4, 8, 8}, at(128), 8);
    device.Copy(1, {at(0), 0, 8, 8}, at(160), 8);
    device.Gather();
    device.Join();
    one.Synchronize();
    for (int row = 0; row < 4; ++row) {
      for (int i = 0; i < 10; ++i) {
        CHECK_EQ(int{bytes[64 + 10 * row + i]}, i < 6 ? 16 * row + i : 0);
      }
    }
    for (int i = 0; i < 64; ++i) CHECK_EQ(int{bytes[128 + i]}, i < 32 ? i : 0);
    CHECK_EQ(one.machine.NumCalls("LaunchKernelEx"), use_ce ? 0 : 2);
  }
}

TEST(ACaptureKeepsItsLanesUntilItEnds) {
  OneGpu one;
  StreamLanes& first = one.gpu.lanes().Find({});
  CHECK(&one.gpu.lanes().Find({}) == &first);
  one.BeginCapture(one.stream);
  StreamDevice captured = one.DeviceOn(first, {});
  captured.Gather();
  captured.Join();
  StreamLanes& second = one.gpu.lanes().Find({});
  CHECK(&second != &first);
  CHECK(&one.gpu.lanes().Find({.num_lanes = 1}) != &second);
  one.EndCapture(one.stream);
  CHECK(&one.gpu.lanes().Find({}) == &first);
}

TEST(ACallWithoutCommunicationRunsOnXlasStream) {
  OneGpu one;
  auto* const values = reinterpret_cast<float*>(one.memory.get());
  values[0] = 1;
  values[1] = 2;
  StreamDevice device(one.gpu.resources(), one.stream.get(), nullptr, {}, {}, {}, {});
  CHECK_EQ(device.num_product_lanes(), 1);
  CHECK_EQ(device.Record(1), kNoEvent);
  const ConstMatrix parts[] = {
      {reinterpret_cast<std::byte*>(values), 1, DType::kF32},
      {reinterpret_cast<std::byte*>(values + 1), 1, DType::kF32}};
  device.Sum(1, parts, 1, 1,
             {reinterpret_cast<std::byte*>(values + 2), 1, DType::kF32});
  device.Join();
  one.Synchronize();
  CHECK_EQ(values[2], 3.0f);
  CHECK_EQ(one.machine.NumCalls("EventRecord"), 0);
}

}  // namespace
}  // namespace jax_ub

CHECK_MAIN()
