// Tests streams, events, copies and allocations of the emulated driver: it orders only
// what CUDA orders, and rejects what CUDA rejects.
#include <fcntl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "check.h"
#include "cuda/emulated_driver.h"
#include "cuda/emulated_gpu.h"
#include "cuda/emulated_machine.h"

using namespace jax_ub;

namespace {

const Driver& driver = EmulatedDriver();
using Gpu = EmulatedGpu;

// Returns whether a copy on `second` reads what `first` has filled, with a join of the
// streams or without one.
bool IsOrdered(uint64_t seed, bool has_join) {
  EmulatedMachine machine({.seed = seed, .max_delay_us = 500});
  const Gpu gpu;
  const Stream first(driver, 0), second(driver, 0);
  const Event there(driver), back(driver);
  const DeviceMemory from(driver, 4096), to(driver, 4096);
  for (uint32_t i = 0; i < 8; ++i) {
    Gpu::Fill(first.get(), from.get(), i, 1024);
    if (has_join) Gpu::Join(second.get(), there, first.get());
    Gpu::Copy(second.get(), to.get(), from.get(), 4096);
    if (has_join) Gpu::Join(first.get(), back, second.get());
  }
  const auto words = Gpu::Read(second.get(), to.get(), 1024);
  Gpu::Synchronize(first.get());
  return words == std::vector<uint32_t>(1024, 7);
}

}  // namespace

TEST(AStreamDoesWhatItIsGivenInOrder) {
  for (const uint64_t seed : {1u, 2u, 3u}) {
    EmulatedMachine machine({.seed = seed, .max_delay_us = 100});
    {
      const Gpu gpu;
      const Stream stream(driver, 0);
      const DeviceMemory memory(driver, 4096);
      for (uint32_t i = 0; i < 20; ++i) Gpu::Fill(stream.get(), memory.get(), i, 1024);
      CHECK(Gpu::Read(stream.get(), memory.get(), 1024) ==
            std::vector<uint32_t>(1024, 19));
    }
    CHECK_EQ(machine.Complaints(), "");
  }
}

TEST(EventsOrderStreams) {
  for (uint64_t seed = 1; seed <= 5; ++seed) CHECK(IsOrdered(seed, true));
}

// Under ThreadSanitizer the first race ends the child; otherwise some seed gives a wrong
// result.
TEST(AMissingJoinShows) {
  const pid_t child = fork();
  if (child == 0) {
    const int nowhere = open("/dev/null", O_WRONLY);
    dup2(nowhere, STDERR_FILENO);
    for (uint64_t seed = 1; seed <= 100; ++seed) {
      if (!IsOrdered(seed, false)) _exit(1);
    }
    _exit(0);
  }
  int status = 0;
  waitpid(child, &status, 0);
#if defined(__SANITIZE_THREAD__)
  CHECK_EQ(WEXITSTATUS(status), 66);
#else
  CHECK_EQ(WEXITSTATUS(status), 1);
#endif
}

TEST(KernelsOfDifferentStreamsRunAtOnce) {
  EmulatedMachine machine;
  {
    const Gpu gpu;
    const EmulatedLibrary library;
    std::vector<std::unique_ptr<Stream>> streams;
    std::vector<std::unique_ptr<EmulatedGate>> gates;
    for (int i = 0; i < 9; ++i) {
      streams.push_back(std::make_unique<Stream>(driver, -5));
      gates.push_back(std::make_unique<EmulatedGate>(library));
    }
    for (int i = 0; i < 8; ++i) gates[i]->Wait(streams[i]->get());
    for (int i = 0; i < 8; ++i) gates[i]->Signal(streams[8]->get());
    for (const auto& stream : streams) Gpu::Synchronize(stream->get());
    for (const auto& gate : gates) CHECK(!gate->has_failed());
  }
  CHECK_EQ(machine.Complaints(), "");
}

// Returns whether a kernel on a third stream runs while a second stream waits for a
// closed gate.
bool RunsBehindAWait(int num_queues) {
  EmulatedMachine machine({.num_queues = num_queues});
  const Gpu gpu;
  const EmulatedLibrary library;
  EmulatedGate gate(library), other(library);
  const Stream first(driver, 0), second(driver, 0), third(driver, 0);
  const Event gated(driver);
  gate.Wait(first.get());
  Gpu::Join(second.get(), gated, first.get());
  other.Signal(third.get());
  for (int i = 0; i < 200 && !other.is_open(); ++i) {
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  const bool is_early = other.is_open();
  gate.Open();
  for (const Stream* stream : {&first, &second, &third})
    Gpu::Synchronize(stream->get());
  CHECK(other.is_open());
  return is_early;
}

TEST(WorkThatCannotStartHoldsUpItsHardwareQueue) {
  CHECK(!RunsBehindAWait(1));
  CHECK(RunsBehindAWait(2));  // the second stream has the other queue
}

TEST(KernelsNeedAMultiprocessorThatGemmsLeaveFree) {
  emulated::Processors processors(132);
  CHECK_EQ(processors.Take(128), 128);
  CHECK_EQ(processors.Take(1), 1);
  CHECK_EQ(processors.Take(132), 3);  // the second GEMM takes what is left
  CHECK_EQ(processors.num_starved(), 0);
  std::thread kernel([&] { CHECK_EQ(processors.Take(1), 1); });
  while (processors.num_starved() == 0) std::this_thread::yield();
  processors.Give(128);
  kernel.join();
}

TEST(AnEventIsTheLastRecordBeforeAWait) {
  EmulatedMachine machine;
  {
    const Gpu gpu;
    const EmulatedLibrary library;
    const Stream blocked(driver, 0), free(driver, 0);
    const Event event(driver);
    EmulatedGate gate(library);
    // An event that was never recorded makes no stream wait.
    Check(driver, driver.StreamWaitEvent(free.get(), event.get(), 0), "wait");
    CHECK_EQ(driver.EventQuery(event.get()), CUDA_SUCCESS);
    Gpu::Synchronize(free.get());
    // A wait refers to the latest record at the time of the call, not to a later one.
    Check(driver, driver.EventRecord(event.get(), free.get()), "record");
    Check(driver, driver.StreamWaitEvent(free.get(), event.get(), 0), "wait");
    gate.Wait(blocked.get());
    Check(driver, driver.EventRecord(event.get(), blocked.get()), "record again");
    Gpu::Synchronize(free.get());
    CHECK_EQ(driver.EventQuery(event.get()), CUDA_ERROR_NOT_READY);
    gate.Open();
    Check(driver, driver.EventSynchronize(event.get()), "synchronize");
    CHECK_EQ(driver.EventQuery(event.get()), CUDA_SUCCESS);
  }
  CHECK_EQ(machine.Complaints(), "");
}

TEST(TimeIsMeasuredBetweenEventsThatMeasureIt) {
  EmulatedMachine machine;
  const Gpu gpu;
  const Stream stream(driver, 0);
  const Event begin(driver, CU_EVENT_DEFAULT), end(driver, CU_EVENT_DEFAULT);
  const Event untimed(driver, CU_EVENT_DISABLE_TIMING);
  float milliseconds = -1;
  CHECK_EQ(driver.EventElapsedTime(&milliseconds, begin.get(), end.get()),
           CUDA_ERROR_INVALID_HANDLE);
  for (const Event* event : {&begin, &untimed, &end}) {
    Check(driver, driver.EventRecord(event->get(), stream.get()), "record");
  }
  Gpu::Synchronize(stream.get());
  CHECK_EQ(driver.EventElapsedTime(&milliseconds, begin.get(), end.get()),
           CUDA_SUCCESS);
  CHECK(milliseconds >= 0);
  CHECK_EQ(driver.EventElapsedTime(&milliseconds, begin.get(), untimed.get()),
           CUDA_ERROR_INVALID_HANDLE);
}

TEST(TheLegacyStreamSynchronizesBlockingStreams) {
  for (uint64_t seed = 1; seed <= 3; ++seed) {
    EmulatedMachine machine({.seed = seed, .max_delay_us = 200});
    const Gpu gpu;
    CUstream blocking = nullptr;
    Check(driver, driver.StreamCreateWithPriority(&blocking, CU_STREAM_DEFAULT, 0),
          "make");
    const DeviceMemory memory(driver, 4096);
    for (uint32_t i = 0; i < 6; ++i) {
      Gpu::Fill(i % 2 == 0 ? blocking : nullptr, memory.get(), i, 1024);
    }
    CHECK(Gpu::Read(blocking, memory.get(), 1024) == std::vector<uint32_t>(1024, 5));
    Check(driver, driver.StreamDestroy(blocking), "destroy");
  }
}

TEST(CopiesOfPageableMemoryReadItAtOnceAndReturnWhenItIsWritten) {
  EmulatedMachine machine({.max_delay_us = 2000});
  {
    const Gpu gpu;
    const Stream stream(driver, 0);
    const DeviceMemory memory(driver, 64);
    for (uint32_t i = 0; i < 8; ++i) {
      std::vector<uint32_t> words(16, i);
      Gpu::Copy(stream.get(), memory.get(), reinterpret_cast<CUdeviceptr>(words.data()),
                64);
      words.assign(16, 999);
      CHECK(Gpu::Read(stream.get(), memory.get(), 16) == std::vector<uint32_t>(16, i));
    }
  }
  CHECK_EQ(machine.Complaints(), "");
}

TEST(NewMemoryIsJunk) {
  EmulatedMachine machine;
  const Gpu gpu;
  const Stream stream(driver, 0);
  const DeviceMemory memory(driver, 1000);
  CHECK(Gpu::Read(stream.get(), memory.get(), 250) ==
        std::vector<uint32_t>(250, 0xFFFFFFFF));
}

TEST(MemoryThatIsNotThereIsNotTouched) {
  EmulatedMachine machine;
  const Gpu gpu;
  const Stream stream(driver, 0);
  DeviceMemory memory(driver, 4096);
  const CUdeviceptr address = memory.get();
  CHECK_EQ(driver.MemsetD8Async(address, 0, 4097, stream.get()),
           CUDA_ERROR_ILLEGAL_ADDRESS);
  memory.reset();
  CHECK_EQ(driver.MemsetD8Async(address, 0, 1, stream.get()),
           CUDA_ERROR_ILLEGAL_ADDRESS);
  const EmulatedLibrary library;
  CopyParams params = {};
  params.from = params.to = address;
  params.num_rows = params.row_bytes = params.unit_bytes = 1;
  CHECK_EQ(library.Launch(kCopyKernel, stream.get(), params),
           CUDA_ERROR_ILLEGAL_ADDRESS);
  CHECK_EQ(machine.Violations().size(), 3u);
  CHECK_EQ(machine.Violations()[2].substr(0, 43),
           "jax_ub_copy on device 0 has no access to 0x");
}

TEST(FreeingWhatIsInUseIsAViolation) {
  EmulatedMachine machine;
  {
    const Gpu gpu;
    const EmulatedLibrary library;
    const Stream stream(driver, 0);
    EmulatedGate gate(library);
    DeviceMemory memory(driver, 4096);
    gate.Wait(stream.get());
    Gpu::Fill(stream.get(), memory.get(), 1, 1024);
    memory.reset();
    gate.Open();
    Gpu::Synchronize(stream.get());
    DeviceMemory later(driver, 4096);
    Gpu::Fill(stream.get(), later.get(), 1, 1024);
    Gpu::Synchronize(stream.get());
  }
  CHECK_EQ(machine.Complaints(), "cuMemFree of memory that 1 operations still use\n");
}

TEST(PeersNeedAccess) {
  EmulatedMachine machine({.num_devices = 3, .without_peer_access = {{0, 2}}});
  {
    const Gpu first(0);
    const Stream stream(driver, 0);
    Event event(driver);
    const Gpu third(2);
    const DeviceMemory unreachable(driver, 64);
    const Gpu second(1);
    const DeviceMemory memory(driver, 64);
    const Stream own(driver, 0);
    Gpu::Fill(own.get(), memory.get(), 3, 16);
    Gpu::Synchronize(own.get());
    CHECK_EQ(driver.MemsetD32Async(memory.get(), 4, 16, stream.get()),
             CUDA_ERROR_ILLEGAL_ADDRESS);
    Check(driver, driver.CtxSetCurrent(first.context()), "current");
    int can_access = -1;
    CHECK_EQ(driver.DeviceCanAccessPeer(&can_access, 0, 1), CUDA_SUCCESS);
    CHECK_EQ(can_access, 1);
    CHECK_EQ(driver.DeviceCanAccessPeer(&can_access, 0, 2), CUDA_SUCCESS);
    CHECK_EQ(can_access, 0);
    CHECK_EQ(driver.CtxEnablePeerAccess(second.context(), 0), CUDA_SUCCESS);
    CHECK_EQ(driver.CtxEnablePeerAccess(second.context(), 0),
             CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED);
    CHECK_EQ(driver.CtxEnablePeerAccess(third.context(), 0),
             CUDA_ERROR_PEER_ACCESS_UNSUPPORTED);
    Gpu::Fill(stream.get(), memory.get(), 4, 16);
    CHECK(Gpu::Read(stream.get(), memory.get(), 16) == std::vector<uint32_t>(16, 4));
    // An event can only be recorded on a stream of its device.
    CHECK_EQ(driver.EventRecord(event.get(), own.get()), CUDA_ERROR_INVALID_HANDLE);
    Check(driver, driver.CtxSetCurrent(second.context()), "current");
  }
  CHECK_EQ(machine.Violations().size(), 1u);
}

TEST(HandlesAreCheckedAndLeaksAreNamed) {
  EmulatedMachine machine({.device_memory_bytes = 1 << 20});
  CUstream stream = nullptr;
  CHECK_EQ(driver.StreamCreateWithPriority(&stream, 0, 0), CUDA_ERROR_INVALID_CONTEXT);
  Context context(driver, 0);
  const ScopedContext scope(driver, context.get());
  Check(driver, driver.StreamCreateWithPriority(&stream, 0, 0), "make");
  CUdeviceptr memory = 0;
  CHECK_EQ(driver.MemAlloc(&memory, (1 << 20) + 1), CUDA_ERROR_OUT_OF_MEMORY);
  CHECK_EQ(driver.MemAlloc(&memory, 0), CUDA_ERROR_INVALID_VALUE);
  Check(driver, driver.MemAlloc(&memory, 1 << 20), "allocate");
  CUdeviceptr more = 0;
  CHECK_EQ(driver.MemAlloc(&more, 1), CUDA_ERROR_OUT_OF_MEMORY);
  CHECK_EQ(machine.Complaints(),
           "never given back: 1 context, 1 stream, 1 allocation\n");
  Check(driver, driver.MemFree(memory), "free");
  Check(driver, driver.StreamDestroy(stream), "destroy");
  CHECK_EQ(driver.StreamDestroy(stream), CUDA_ERROR_INVALID_HANDLE);
  CHECK_EQ(driver.MemFree(memory), CUDA_ERROR_INVALID_VALUE);
  CHECK_EQ(driver.MemsetD8Async(memory, 0, 1, stream), CUDA_ERROR_INVALID_HANDLE);
  context = {};
  CHECK_EQ(machine.Complaints(),
           "cuStreamDestroy of a stream that is not there\n"
           "cuMemFree of memory that is not there\n");
}

TEST(AContextThatEndsBeforeItsStreamsIsAViolation) {
  EmulatedMachine machine;
  Context context(driver, 0);
  auto scope = std::make_unique<ScopedContext>(driver, context.get());
  const Stream stream(driver, 0);
  context = {};
  scope.reset();
  CHECK_EQ(machine.Violations().size(), 1u);
  CHECK_EQ(machine.Violations()[0],
           "the context of device 0 ended before its 1 stream");
}

TEST(TheNthCallFails) {
  EmulatedMachine machine;
  const Gpu gpu;
  CUdeviceptr memory = 0;
  machine.Fail("MemAlloc", CUDA_ERROR_UNKNOWN, 2);
  CHECK_EQ(driver.MemAlloc(&memory, 64), CUDA_SUCCESS);
  Check(driver, driver.MemFree(memory), "free");
  CHECK_EQ(driver.MemAlloc(&memory, 64), CUDA_ERROR_UNKNOWN);
  CHECK_EQ(driver.MemAlloc(&memory, 64), CUDA_SUCCESS);
  Check(driver, driver.MemFree(memory), "free");
  CHECK_EQ(machine.NumCalls("MemAlloc"), 3);
  machine.Fail("MemAlloc", CUDA_ERROR_NOT_PERMITTED, 0);
  for (int i = 0; i < 3; ++i) {
    CHECK_EQ(driver.MemAlloc(&memory, 64), CUDA_ERROR_NOT_PERMITTED);
  }
  CHECK_THROWS(DeviceMemory(driver, 64),
               "CUDA_ERROR_NOT_PERMITTED: operation not permitted");
}

TEST(MemoryCallsMayWaitForTheDevice) {
  EmulatedMachine machine({.max_delay_us = 3000, .memory_calls_synchronize = true});
  {
    const Gpu gpu;
    const Stream stream(driver, 0);
    for (int i = 0; i < 5; ++i) {
      const DeviceMemory memory(driver, 64);
      Gpu::Fill(stream.get(), memory.get(), 1, 16);
    }
  }
  CHECK_EQ(machine.Complaints(), "");
}

TEST(LaunchesAreChecked) {
  EmulatedMachine machine({.num_devices = 2});
  const Gpu other(1);
  const Stream elsewhere(driver, 0);
  const Gpu gpu(0);
  const Stream stream(driver, 0);
  const unsigned char image[] = "any";
  const Library library(driver, image);
  CUkernel kernel = nullptr;
  CHECK_EQ(driver.LibraryGetKernel(&kernel, library.get(), "nothing"),
           CUDA_ERROR_NOT_FOUND);
  const DeviceMemory memory(driver, 64);
  CopyParams params = {};
  params.from = memory.get();
  params.to = memory.get() + 32;
  params.num_rows = 1;
  params.row_bytes = params.unit_bytes = 16;
  void* pointers[] = {&params};
  CUlaunchConfig config = {};
  config.gridDimX = 6;
  config.gridDimY = config.gridDimZ = config.blockDimY = config.blockDimZ = 1;
  config.blockDimX = 128;
  config.hStream = stream.get();
  const CUfunction copy = library.Function(kCopyKernel);
  const auto launch = [&] {
    return driver.LaunchKernelEx(&config, copy, pointers, nullptr);
  };
  CHECK_EQ(launch(), CUDA_SUCCESS);
  config.blockDimX = 1025;
  CHECK_EQ(launch(), CUDA_ERROR_INVALID_VALUE);
  config.blockDimX = 128;
  CUlaunchAttribute cluster = {};
  cluster.id = CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION;
  cluster.value.clusterDim = {4, 1, 1};
  config.attrs = &cluster;
  config.numAttrs = 1;
  CHECK_EQ(launch(), CUDA_ERROR_INVALID_CLUSTER_SIZE);
  cluster.value.clusterDim.x = 3;
  CHECK_EQ(launch(), CUDA_SUCCESS);
  config.hStream = elsewhere.get();
  CHECK_EQ(launch(), CUDA_ERROR_INVALID_HANDLE);
  Gpu::Synchronize(stream.get());
}

TEST(AKernelIsLoadedByItsFirstLaunchUnlessItWasBefore) {
  EmulatedMachine machine;
  const Gpu gpu;
  const Stream stream(driver, 0);
  const unsigned char image[] = "any";
  const Library library(driver, image);
  const CUfunction loaded = library.Function(kCopyKernel);
  CUkernel kernel = nullptr;
  CUfunction lazy = nullptr;
  CHECK_EQ(driver.LibraryGetKernel(&kernel, library.get(), kCopyKernel), CUDA_SUCCESS);
  CHECK_EQ(driver.KernelGetFunction(&lazy, kernel), CUDA_SUCCESS);
  CopyParams params = {};  // of no rows
  params.row_bytes = params.unit_bytes = 16;
  void* pointers[] = {&params};
  CUlaunchConfig config = {};
  config.gridDimX = config.gridDimY = config.gridDimZ = 1;
  config.blockDimX = config.blockDimY = config.blockDimZ = 1;
  config.hStream = stream.get();
  const auto launch = [&](CUfunction function) {
    const EmulatedLaunchesOnly nothing_loads;
    CHECK_EQ(driver.LaunchKernelEx(&config, function, pointers, nullptr), CUDA_SUCCESS);
    return machine.Violations().size();
  };
  CHECK_EQ(launch(loaded), 0u);
  CHECK_EQ(launch(lazy), 1u);
  CHECK_EQ(launch(lazy), 1u);
  CHECK_EQ(machine.Violations()[0], "jax_ub_copy loads lazily while a peer may spin");
  Gpu::Synchronize(stream.get());
}

TEST(AChildOfForkHasNoDriverUntilItMakesAMachine) {
  EmulatedMachine machine;
  const pid_t child = fork();
  if (child == 0) {
    int count = 0;
    const bool refused = driver.DeviceGetCount(&count) == CUDA_ERROR_NOT_INITIALIZED;
    EmulatedMachine own({.num_devices = 3});
    const bool counted = driver.DeviceGetCount(&count) == CUDA_SUCCESS && count == 3;
    _exit(refused && counted ? 0 : 1);
  }
  int status = 0;
  waitpid(child, &status, 0);
  CHECK_EQ(status, 0);
}

CHECK_MAIN()
