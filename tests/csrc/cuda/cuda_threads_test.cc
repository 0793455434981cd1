// Tests several threads that enqueue calls on one device, as when several threads of a
// program dispatch to it: lanes and the events between them belong to one call at a
// time.
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <cstring>
#include <memory>
#include <thread>
#include <vector>

#include "check.h"
#include "cuda/cuda_calls.h"
#include "engine/cuda/cuda_engine.h"

namespace jax_ub {
namespace {

// Each thread reads the results of its own call, on XLA's stream.
TEST(ThreadsTakeTurnsWithTheLanesOfADevice) {
  constexpr int kTimes = 200;
  Driver driver = EmulatedDriver();
  driver.EventRecord = [](CUevent event, CUstream stream) {
    const CUresult result = EmulatedDriver().EventRecord(event, stream);
    // The delay lets the other thread run before the waits for this event.
    std::this_thread::sleep_for(std::chrono::microseconds(10));
    return result;
  };
  Gpus gpus({.num_devices = 1, .seed = 2, .max_delay_us = 30}, kLongS, driver);
  std::vector<std::unique_ptr<GpuCalls>> calls;
  std::vector<DeviceMemory> found;
  for (const Op op : {Op::kAllGatherMatmul, Op::kWgrad}) {
    CallAttributes at = MakeAttributes(op, Method::kRingExchange, 1);
    if (op == Op::kWgrad) at.gather = Gather::kX;  // whose product waits for a copy
    calls.push_back(
        std::make_unique<GpuCalls>(gpus, at, jax_ub_test::Sizes{}, DType::kF32, 1));
    calls.back()->Initialize(0);
    calls.back()->Workspace(0);
    const int64_t size_bytes = calls.back()->on_device(0).results[0].size_bytes();
    found.push_back(gpus.New(0, kTimes * size_bytes));
  }
  std::vector<std::thread> threads;
  for (size_t i = 0; i < calls.size(); ++i) {
    threads.emplace_back([&, i] {
      const ScopedContext current(gpus.driver, gpus.context(0));
      const Tensor& result = calls[i]->on_device(0).results[0];
      const auto data = reinterpret_cast<CUdeviceptr>(result.data);
      const int64_t size_bytes = result.size_bytes();
      for (int n = 0; n < kTimes; ++n) {
        gpus.driver.MemsetD8Async(data, 0xff, size_bytes, gpus.stream(0));
        calls[i]->Execute(0);
        gpus.driver.MemcpyAsync(found[i].get() + n * size_bytes, data, size_bytes,
                                gpus.stream(0));
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  gpus.Synchronize();
  for (size_t i = 0; i < calls.size(); ++i) {
    CheckRight(*calls[i]);
    const Tensor& result = calls[i]->on_device(0).results[0];
    const auto* const copies = reinterpret_cast<const std::byte*>(found[i].get());
    int num_wrong = 0;
    for (int n = 0; n < kTimes; ++n) {
      num_wrong += std::memcmp(copies + n * result.size_bytes(), result.data,
                               result.size_bytes()) != 0;
    }
    CHECK_EQ(num_wrong, 0);
  }
}

// The progress of the thread that enqueues a call, which the replaced driver function
// sets.
enum class Stage { kBefore, kBegins, kEnqueues, kMayGoOn };
std::atomic<Stage> stage{Stage::kBefore};

// A thread that holds a lock in the parent does not exist in the child.
TEST(AChildOfForkLeavesWhileItsParentEnqueues) {
  Driver driver = EmulatedDriver();
  driver.EventRecord = [](CUevent event, CUstream stream) {
    Stage begun = Stage::kBegins;
    if (stage.compare_exchange_strong(begun, Stage::kEnqueues)) {
      while (stage != Stage::kMayGoOn) std::this_thread::yield();
    }
    return EmulatedDriver().EventRecord(event, stream);
  };
  Gpus gpus({.num_devices = 1}, kLongS, driver);
  GpuCalls calls(gpus, MakeAttributes(Op::kAllGatherMatmul, Method::kRingExchange, 1),
                 jax_ub_test::Sizes{}, DType::kF32, 1);
  calls.Initialize(0);
  calls.Workspace(0);
  const auto communicator = CudaCommunicator::Make(driver, {0}, 4096);
  gpus.engine().Join(communicator, {0});
  stage = Stage::kBegins;
  std::thread enqueues([&] { calls.Execute(0); });
  while (stage != Stage::kEnqueues) std::this_thread::yield();
  const pid_t child = fork();
  if (child == 0) {
    gpus.engine().Leave(communicator);
    _exit(0);
  }
  const Deadline deadline = Deadline::After(20);
  while (waitpid(child, nullptr, WNOHANG) == 0) {
    if (deadline.Expired()) {
      CHECK(!"the child left");
      kill(child, SIGKILL);
      waitpid(child, nullptr, 0);
      break;
    }
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  stage = Stage::kMayGoOn;
  enqueues.join();
  gpus.engine().Leave(communicator);
}

}  // namespace
}  // namespace jax_ub

CHECK_MAIN()
