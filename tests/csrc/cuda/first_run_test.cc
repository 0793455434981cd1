// Tests the first run of a call by several devices of a process, on a driver that holds
// a lock of the process while it loads kernels.
#include "engine/cuda/first_run.h"

#include <atomic>
#include <chrono>
#include <future>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "check.h"
#include "cuda/cuda_calls.h"
#include "cuda/emulated_gpu.h"
#include "platform/error.h"

namespace jax_ub {
namespace {

using Stage = FirstRun::Stage;

std::exception_ptr Nothing() { return nullptr; }

TEST(DevicesWaitForEachOtherInTheFirstRunOnly) {
  FirstRun first_run;
  std::atomic<bool> is_late = true;
  const auto await = [&](int ordinal, Stage stage) {
    return first_run.Await(ordinal, stage, {0, 3}, Deadline::After(60), Nothing);
  };
  auto early = std::async(std::launch::async, [&] {
    CHECK(await(0, Stage::kReady).empty());
    CHECK(!is_late);
    return await(0, Stage::kEnqueued).empty();
  });
  std::this_thread::sleep_for(std::chrono::milliseconds(20));
  is_late = false;
  CHECK(await(3, Stage::kReady).empty());
  CHECK(!first_run.IsOver(3));
  CHECK(await(3, Stage::kEnqueued).empty());
  CHECK(early.get());
  CHECK(first_run.IsOver(0) && first_run.IsOver(3));
}

TEST(AWaitEndsAtTheDeadlineAtAFailureAndWhenADeviceLeaves) {
  FirstRun first_run;
  CHECK(first_run.Await(0, Stage::kReady, {0, 1, 2}, Deadline::After(0.01), Nothing) ==
        (std::vector<int>{1, 2}));
  const auto fails = [] { return std::make_exception_ptr(std::runtime_error("why")); };
  CHECK_THROWS(first_run.Await(0, Stage::kReady, {0, 1, 2}, Deadline::After(60), fails),
               "why");
  first_run.Leave(1);
  first_run.Leave(2);
  CHECK(first_run.Await(0, Stage::kEnqueued, {0, 1, 2}, Deadline::After(60), Nothing)
            .empty());
}

// The first use of a device loads its kernels. GPU 1 has no memory left for them.
TEST(CommunicatorsLeaveAlsoIfADeviceHasFailedToLoad) {
  Gpus gpus({.num_devices = 2});
  const auto communicator = CudaCommunicator::Make(gpus.driver, {0}, 4096, "zero");
  gpus.engine().Join(communicator, {0});
  const auto other = CudaCommunicator::Make(gpus.driver, {1}, 4096, "one");
  gpus.machine.Fail("LibraryLoadData", CUDA_ERROR_OUT_OF_MEMORY);
  CHECK_THROWS(gpus.engine().Join(other, {1}), "cuLibraryLoadData");
  gpus.engine().Leave(communicator);
  CHECK_THROWS(communicator->ThrowIfFailed(), "it closed its communicator");
  gpus.engine().Join(other, {1});  // tries again
  gpus.engine().Leave(other);
}

// Runs a call on two GPUs, as XLA does in a program with other kernels, which it loads
// when it launches them: a thread for each device. Device 0 is ahead and loads a kernel
// after the call, device 1 one before it. Returns the errors of the communicators.
std::string RunWithOtherKernels(bool together) {
  Gpus gpus({.num_devices = 2, .loads_drain_device = true}, together ? kLongS : 1);
  GpuCalls calls(gpus, MakeAttributes(Op::kAllGatherMatmul, Method::kRingExchange, 2),
                 {}, DType::kF32, 1);
  std::promise<void> first_loads;
  std::shared_future<void> loads = first_loads.get_future().share();
  const auto run = [&](int rank, const auto& before, const auto& after) {
    const ScopedContext current(gpus.driver, gpus.context(rank));
    try {
      calls.Initialize(rank);
      before();
      together ? calls.ExecuteTogether(rank) : calls.Execute(rank);
    } catch (const CommunicatorError&) {
      CHECK(!together);  // the peer has failed
    }
    after();
  };
  const auto nothing = [] {};
  const auto load = [] { const EmulatedLibrary library; };
  const auto load_first = [&] {
    first_loads.set_value();
    load();
  };
  const auto load_later = [&] {
    loads.wait_for(std::chrono::milliseconds(200));
    std::this_thread::sleep_for(std::chrono::milliseconds(50));
    load();
  };
  auto ahead = std::async(std::launch::async, [&] { run(0, nothing, load_first); });
  run(1, load_later, nothing);
  ahead.get();
  gpus.Synchronize();
  if (together) CheckRight(calls);
  std::string errors;
  for (const auto& [name, failure] : gpus.engine().Failures()) {
    try {
      std::rethrow_exception(failure);
    } catch (const Error& error) {
      errors += error.what();
    }
  }
  return errors;
}

TEST(LoadingAKernelNextToAFirstRunHangsUnlessTheDevicesStayTogether) {
  const std::string hung = RunWithOtherKernels(false);
  // The error says "1 s" or, for example, "1.00007 s".
  CHECK(hung.find("rank 0 waited 1") != std::string::npos);
  CHECK_EQ(RunWithOtherKernels(true), "");
}

TEST(LaterRunsDoNotWait) {
  Gpus gpus({.num_devices = 3, .loads_drain_device = true});
  GpuCalls calls(gpus,
                 MakeAttributes(Op::kMatmulReduceScatter, Method::kRingExchange, 3), {},
                 DType::kF32, 1);
  std::vector<std::thread> threads;
  for (int rank = 0; rank < 3; ++rank) {
    threads.emplace_back([&, rank] {
      calls.Initialize(rank);
      calls.ExecuteTogether(rank);
    });
  }
  for (std::thread& thread : threads) thread.join();
  for (int rank = 0; rank < 3; ++rank) calls.ExecuteTogether(rank);  // by one thread
  gpus.Synchronize();
  CheckRight(calls);
}

TEST(AMissingDeviceIsNamedAtTheDeadline) {
  Gpus gpus({.num_devices = 2}, 0.2);
  GpuCalls calls(gpus, MakeAttributes(Op::kAllGatherMatmul, Method::kRingExchange, 2),
                 {}, DType::kF32, 1);
  for (int rank = 0; rank < 2; ++rank) calls.Initialize(rank);
  CHECK_THROWS(calls.ExecuteTogether(0),
               "GPU 0 waited 0 s for the thread of GPU 1 of this process, which has "
               "not begun the first run of the call");
  CHECK_THROWS(calls.ExecuteTogether(1), "TimeoutError: jax_ub.all_gather_matmul");
}

TEST(AnErrorOfOneDeviceEndsTheWaitOfTheOther) {
  Gpus gpus({.num_devices = 2});
  GpuCalls calls(gpus, MakeAttributes(Op::kAllGatherMatmul, Method::kRingExchange, 2),
                 {}, DType::kF32, 1);
  for (int rank = 0; rank < 2; ++rank) calls.Initialize(rank);
  gpus.machine.Fail("MemcpyAsync", CUDA_ERROR_UNKNOWN);
  int num_failed = 0;
  const auto run = [&](int rank) {
    try {
      calls.ExecuteTogether(rank);
      return 0;
    } catch (const Error& error) {
      CHECK(std::string(error.what()).find("cuMemcpyAsync: CUDA_ERROR_UNKNOWN") !=
            std::string::npos);
      return 1;
    }
  };
  auto other = std::async(std::launch::async, [&] { return run(1); });
  num_failed += run(0);
  num_failed += other.get();
  CHECK(num_failed > 0);
  gpus.Synchronize();
  CHECK_EQ(gpus.engine().Failures().size(), 1u);
}

TEST(ADeviceWhoseInitializationFailedIsNamed) {
  Gpus gpus({.num_devices = 2});
  GpuCalls calls(gpus, MakeAttributes(Op::kAllGatherMatmul, Method::kRingExchange, 2),
                 {}, DType::kF32, 1);
  gpus.machine.Fail("MemAllocAsync", CUDA_ERROR_OUT_OF_MEMORY);
  CHECK_THROWS(calls.Initialize(0), "cuMemAllocAsync: CUDA_ERROR_OUT_OF_MEMORY");
  CHECK_THROWS(calls.ExecuteTogether(0), "was not initialized on device 0");
}

}  // namespace
}  // namespace jax_ub

CHECK_MAIN()
