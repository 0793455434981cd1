// Tests the capture and replay of graphs in the emulated driver.
#include <chrono>
#include <functional>
#include <memory>
#include <thread>
#include <vector>

#include "check.h"
#include "cuda/emulated_driver.h"
#include "cuda/emulated_gpu.h"

using namespace jax_ub;

namespace {

const Driver& driver = EmulatedDriver();
using Gpu = EmulatedGpu;

void Begin(CUstream stream,
           CUstreamCaptureMode mode = CU_STREAM_CAPTURE_MODE_THREAD_LOCAL) {
  Check(driver, driver.StreamBeginCapture(stream, mode), "begin");
}

CUresult End(CUstream stream) {
  CUgraph graph = nullptr;
  const CUresult result = driver.StreamEndCapture(stream, &graph);
  if (graph != nullptr) driver.GraphDestroy(graph);
  return result;
}

CUstreamCaptureStatus StatusOf(CUstream stream) {
  CUstreamCaptureStatus status = CU_STREAM_CAPTURE_STATUS_NONE;
  Check(driver, driver.StreamIsCapturing(stream, &status), "status");
  return status;
}

// An instantiated graph of the work that was captured from a stream.
class Captured {
 public:
  explicit Captured(CUstream stream) {
    CUgraph graph = nullptr;
    Check(driver, driver.StreamEndCapture(stream, &graph), "end");
    Check(driver, driver.GraphInstantiate(&exec_, graph, 0), "instantiate");
    Check(driver, driver.GraphDestroy(graph), "destroy");
  }
  ~Captured() { driver.GraphExecDestroy(exec_); }
  Captured(const Captured&) = delete;

  void Launch(CUstream stream) {
    Check(driver, driver.GraphLaunch(exec_, stream), "launch");
  }
  CUgraphExec get() const { return exec_; }

 private:
  CUgraphExec exec_ = nullptr;
};

}  // namespace

TEST(ACaptureOfSeveralStreamsReplays) {
  for (uint64_t seed = 1; seed <= 4; ++seed) {
    EmulatedMachine machine({.seed = seed, .max_delay_us = 200});
    {
      const Gpu gpu;
      const Stream main(driver, 0), left(driver, 0), right(driver, 0);
      const Event fork(driver), left_done(driver), right_done(driver);
      const DeviceMemory from(driver, 4096), to(driver, 8192);
      Begin(main.get());
      Gpu::Join(left.get(), fork, main.get());
      Gpu::Join(right.get(), fork, main.get());
      CHECK_EQ(StatusOf(right.get()), CU_STREAM_CAPTURE_STATUS_ACTIVE);
      Gpu::Copy(left.get(), to.get(), from.get(), 4096);
      Gpu::Copy(right.get(), to.get() + 4096, from.get(), 4096);
      Gpu::Join(main.get(), left_done, left.get());
      Gpu::Join(main.get(), right_done, right.get());
      // This fill runs after both copies.
      Gpu::Fill(main.get(), from.get(), 77, 1024);
      Captured captured(main.get());
      CHECK_EQ(StatusOf(right.get()), CU_STREAM_CAPTURE_STATUS_NONE);
      for (uint32_t i = 0; i < 10; ++i) {
        Gpu::Fill(main.get(), from.get(), i, 1024);
        captured.Launch(main.get());
        CHECK(Gpu::Read(main.get(), to.get(), 2048) == std::vector<uint32_t>(2048, i));
        CHECK(Gpu::Read(main.get(), from.get(), 1024) ==
              std::vector<uint32_t>(1024, 77));
      }
    }
    CHECK_EQ(machine.Complaints(), "");
  }
}

TEST(NothingRunsWhileItIsCaptured) {
  EmulatedMachine machine;
  const Gpu gpu;
  const Stream stream(driver, 0), other(driver, 0);
  const DeviceMemory memory(driver, 64);
  Gpu::Fill(other.get(), memory.get(), 1, 16);
  Begin(stream.get());
  Gpu::Fill(stream.get(), memory.get(), 2, 16);
  CHECK(Gpu::Read(other.get(), memory.get(), 16) == std::vector<uint32_t>(16, 1));
  CHECK_EQ(End(stream.get()), CUDA_SUCCESS);
}

TEST(NodesThatDoNotDependRunAtOnce) {
  EmulatedMachine machine;
  {
    const Gpu gpu;
    const EmulatedLibrary library;
    const Stream main(driver, 0), side(driver, 0);
    const Event fork(driver), join(driver);
    EmulatedGate gate(library);
    Begin(main.get());
    Gpu::Join(side.get(), fork, main.get());
    gate.Wait(main.get());
    gate.Signal(side.get());
    Gpu::Join(main.get(), join, side.get());
    Captured captured(main.get());
    for (int i = 0; i < 3; ++i) {
      gate.Close();
      captured.Launch(main.get());
      Gpu::Synchronize(main.get());
    }
    CHECK(!gate.has_failed());
  }
  CHECK_EQ(machine.Complaints(), "");
}

// With one hardware queue, a branch may be held up by a node of the other branch, if
// that node comes first in a random order.
TEST(NodesStartInAnyOrderThatTheirDependenciesAllow) {
  EmulatedMachine machine({.num_queues = 1});
  const Gpu gpu;
  const EmulatedLibrary library;
  EmulatedGate gate(library), other(library);
  const Stream main(driver, 0), side(driver, 0);
  const Event fork(driver), join(driver);
  const DeviceMemory memory(driver, 4096);
  Begin(main.get());
  Gpu::Join(side.get(), fork, main.get());
  gate.Wait(main.get());
  Gpu::Fill(main.get(), memory.get(), 1, 1);  // cannot start before the gate
  other.Signal(side.get());
  Gpu::Join(main.get(), join, side.get());
  Captured captured(main.get());
  int num_early = 0;
  constexpr int kLaunches = 30;
  for (int i = 0; i < kLaunches; ++i) {
    gate.Close();
    other.Close();
    captured.Launch(main.get());
    for (int k = 0; k < 50 && !other.is_open(); ++k) {
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
    num_early += other.is_open();
    gate.Open();
    Gpu::Synchronize(main.get());
    CHECK(other.is_open());
  }
  CHECK(num_early > 0 && num_early < kLaunches);
}

TEST(LaunchesOfOneGraphDoNotOverlap) {
  EmulatedMachine machine({.max_delay_us = 300});
  {
    const Gpu gpu;
    const Stream main(driver, 0), other(driver, 0);
    const DeviceMemory memory(driver, 4096), copy(driver, 4096);
    Begin(main.get());
    for (uint32_t i = 0; i < 4; ++i) Gpu::Fill(main.get(), memory.get(), i, 1024);
    Gpu::Copy(main.get(), copy.get(), memory.get(), 4096);
    Captured captured(main.get());
    for (int i = 0; i < 4; ++i) {
      captured.Launch(main.get());
      captured.Launch(other.get());
    }
    Gpu::Synchronize(main.get());
    CHECK(Gpu::Read(other.get(), copy.get(), 1024) == std::vector<uint32_t>(1024, 3));
  }
  CHECK_EQ(machine.Complaints(), "");
}

TEST(AGraphMayBeCapturedInAnother) {
  EmulatedMachine machine;
  {
    const Gpu gpu;
    const Stream stream(driver, 0);
    const DeviceMemory memory(driver, 64), copy(driver, 64);
    Begin(stream.get());
    Gpu::Copy(stream.get(), copy.get(), memory.get(), 64);
    Captured inner(stream.get());
    Begin(stream.get());
    Gpu::Fill(stream.get(), memory.get(), 1, 16);
    inner.Launch(stream.get());
    Gpu::Fill(stream.get(), memory.get(), 2, 16);
    Captured outer(stream.get());
    outer.Launch(stream.get());
    CHECK(Gpu::Read(stream.get(), copy.get(), 16) == std::vector<uint32_t>(16, 1));
    CHECK(Gpu::Read(stream.get(), memory.get(), 16) == std::vector<uint32_t>(16, 2));
  }
  CHECK_EQ(machine.Complaints(), "");
}

TEST(WorkThatIsNotJoinedFailsTheCapture) {
  EmulatedMachine machine;
  const Gpu gpu;
  const Stream main(driver, 0), side(driver, 0);
  const Event fork(driver), join(driver);
  const DeviceMemory memory(driver, 64);
  Begin(main.get());
  Gpu::Join(side.get(), fork, main.get());
  Gpu::Fill(side.get(), memory.get(), 1, 16);
  CHECK_EQ(End(main.get()), CUDA_ERROR_STREAM_CAPTURE_UNJOINED);
  CHECK_EQ(StatusOf(side.get()), CU_STREAM_CAPTURE_STATUS_NONE);
  // The side stream is joined, and then gets more work.
  Begin(main.get());
  Gpu::Join(side.get(), fork, main.get());
  Gpu::Join(main.get(), join, side.get());
  Gpu::Fill(side.get(), memory.get(), 1, 16);
  CHECK_EQ(End(main.get()), CUDA_ERROR_STREAM_CAPTURE_UNJOINED);
}

TEST(WhatMayBlockIsRefusedWhileTheThreadCaptures) {
  EmulatedMachine machine;
  const Gpu gpu;
  const Stream main(driver, 0), other(driver, 0);
  const Event event(driver);
  CUdeviceptr memory = 0;
  void* host = nullptr;
  const std::vector<std::function<CUresult()>> calls = {
      [&] { return driver.MemAlloc(&memory, 64); },
      [&] { return driver.MemHostAlloc(&host, 64, 0); },
      [&] { return driver.StreamSynchronize(main.get()); },
      [&] { return driver.StreamSynchronize(other.get()); },
      [&] { return driver.EventQuery(event.get()); },
      [&] { return driver.EventSynchronize(event.get()); },
      [&] { return driver.CtxSynchronize(); }};
  for (const auto& call : calls) {
    Begin(main.get());
    CHECK_EQ(call(), CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED);
    CHECK_EQ(StatusOf(main.get()), CU_STREAM_CAPTURE_STATUS_INVALIDATED);
    CHECK_EQ(driver.EventRecord(event.get(), main.get()),
             CUDA_ERROR_STREAM_CAPTURE_INVALIDATED);
    CHECK_EQ(End(main.get()), CUDA_ERROR_STREAM_CAPTURE_INVALIDATED);
    CHECK_EQ(StatusOf(main.get()), CU_STREAM_CAPTURE_STATUS_NONE);
  }
  // A capture affects other threads only in global mode.
  const auto elsewhere = [&] {
    CUresult result = CUDA_SUCCESS;
    std::thread([&] {
      const ScopedContext scope(driver, gpu.context());
      result = driver.MemAlloc(&memory, 64);
      if (result == CUDA_SUCCESS) driver.MemFree(memory);
    }).join();
    return result;
  };
  Begin(main.get());
  CHECK_EQ(elsewhere(), CUDA_SUCCESS);
  CHECK_EQ(End(main.get()), CUDA_SUCCESS);
  Begin(main.get(), CU_STREAM_CAPTURE_MODE_GLOBAL);
  CHECK_EQ(elsewhere(), CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED);
  CHECK_EQ(End(main.get()), CUDA_ERROR_STREAM_CAPTURE_INVALIDATED);
  CHECK_EQ(machine.Live().allocations, 0);
}

TEST(CapturesDoNotMixWithWhatIsNotCaptured) {
  EmulatedMachine machine;
  const Gpu gpu;
  const Stream first(driver, 0), second(driver, 0), third(driver, 0);
  const Event outside(driver), inside(driver);
  Check(driver, driver.EventRecord(outside.get(), third.get()), "record");
  Begin(first.get());
  CHECK_EQ(driver.StreamWaitEvent(first.get(), outside.get(), 0),
           CUDA_ERROR_STREAM_CAPTURE_ISOLATION);
  CHECK_EQ(End(first.get()), CUDA_ERROR_STREAM_CAPTURE_INVALIDATED);
  Begin(first.get());
  Check(driver, driver.EventRecord(inside.get(), first.get()), "record");
  CHECK_EQ(driver.EventQuery(inside.get()), CUDA_ERROR_CAPTURED_EVENT);
  CHECK_EQ(End(first.get()), CUDA_ERROR_STREAM_CAPTURE_INVALIDATED);
  CHECK_EQ(driver.StreamWaitEvent(third.get(), inside.get(), 0),
           CUDA_ERROR_CAPTURED_EVENT);
  Begin(first.get());
  Begin(second.get());
  Check(driver, driver.EventRecord(inside.get(), first.get()), "record");
  CHECK_EQ(driver.StreamWaitEvent(second.get(), inside.get(), 0),
           CUDA_ERROR_STREAM_CAPTURE_MERGE);
  CHECK_EQ(End(first.get()), CUDA_ERROR_STREAM_CAPTURE_INVALIDATED);
  CHECK_EQ(End(second.get()), CUDA_ERROR_STREAM_CAPTURE_INVALIDATED);
}

TEST(ACaptureEndsWhereItBegan) {
  EmulatedMachine machine;
  const Gpu gpu;
  const Stream main(driver, 0), side(driver, 0);
  const Event fork(driver);
  CHECK_EQ(End(main.get()), CUDA_ERROR_ILLEGAL_STATE);
  Begin(main.get());
  CHECK_EQ(driver.StreamBeginCapture(main.get(), CU_STREAM_CAPTURE_MODE_RELAXED),
           CUDA_ERROR_ILLEGAL_STATE);
  CUresult result = CUDA_SUCCESS;
  std::thread([&] {
    const ScopedContext scope(driver, gpu.context());
    result = End(main.get());
  }).join();
  CHECK_EQ(result, CUDA_ERROR_STREAM_CAPTURE_WRONG_THREAD);
  Gpu::Join(side.get(), fork, main.get());
  CHECK_EQ(End(side.get()), CUDA_ERROR_STREAM_CAPTURE_UNMATCHED);
  CHECK_EQ(End(main.get()), CUDA_ERROR_STREAM_CAPTURE_INVALIDATED);
  CHECK_EQ(driver.StreamBeginCapture(nullptr, CU_STREAM_CAPTURE_MODE_THREAD_LOCAL),
           CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED);
}

TEST(TheLegacyStreamIsNotCapturedImplicitly) {
  EmulatedMachine machine;
  const Gpu gpu;
  CUstream blocking = nullptr;
  Check(driver, driver.StreamCreateWithPriority(&blocking, CU_STREAM_DEFAULT, 0),
        "make");
  const DeviceMemory memory(driver, 64);
  Begin(blocking);
  CHECK_EQ(driver.MemsetD8Async(memory.get(), 0, 64, nullptr),
           CUDA_ERROR_STREAM_CAPTURE_IMPLICIT);
  CHECK_EQ(End(blocking), CUDA_ERROR_STREAM_CAPTURE_INVALIDATED);
  Check(driver, driver.StreamDestroy(blocking), "destroy");
}

TEST(AReplayLooksAtTheMemoryOfItsTime) {
  EmulatedMachine machine;
  const Gpu gpu;
  const Stream stream(driver, 0);
  DeviceMemory memory(driver, 64);
  Begin(stream.get());
  Gpu::Fill(stream.get(), memory.get(), 1, 16);
  Captured captured(stream.get());
  captured.Launch(stream.get());
  Gpu::Synchronize(stream.get());
  CHECK_EQ(machine.Live().graph_execs, 1);
  CHECK_EQ(machine.Live().graphs, 0);
  memory.reset();
  CHECK_EQ(driver.GraphLaunch(captured.get(), stream.get()),
           CUDA_ERROR_ILLEGAL_ADDRESS);
  CHECK_EQ(machine.Violations().size(), 1u);
}

CHECK_MAIN()
