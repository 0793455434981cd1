// Owners of driver resources: the last owner releases a resource exactly once, also if a
// later step fails.
#include "platform/cuda/owners.h"

#include <cstdint>
#include <string>
#include <thread>
#include <utility>

#include "check.h"
#include "cuda/emulated_driver.h"

namespace jax_ub {
namespace {

TEST(AContextIsThePrimaryOneAndReleased) {
  EmulatedMachine machine({.num_devices = 2});
  const Driver& driver = EmulatedDriver();
  {
    const Context first(driver, 1);
    const Context second(driver, 1);
    CHECK_EQ(first.get(), second.get());
    CHECK_EQ(first.device(), second.device());
    CHECK_EQ(first.Attribute(CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR), 9);
    CHECK_EQ(machine.Live().contexts, 1);
  }
  CHECK_THROWS(Context(driver, 2), "cuDeviceGet: CUDA_ERROR_INVALID_DEVICE");
  CHECK_EQ(machine.Complaints(), "");
}

TEST(AScopeRestoresTheContextBeforeIt) {
  EmulatedMachine machine({.num_devices = 2});
  const Driver& driver = EmulatedDriver();
  const Context outer(driver, 0);
  const Context inner(driver, 1);
  const auto current = [&] {
    CUcontext context = nullptr;
    Check(driver, driver.CtxGetCurrent(&context), "cuCtxGetCurrent");
    return context;
  };
  CHECK_EQ(current(), CUcontext{});
  {
    const ScopedContext in_outer(driver, outer.get());
    {
      const ScopedContext in_inner(driver, inner.get());
      CHECK_EQ(current(), inner.get());
    }
    CHECK_EQ(current(), outer.get());
  }
  CHECK_EQ(current(), CUcontext{});
}

TEST(AMovedResourceIsFreedOnce) {
  EmulatedMachine machine;
  const Driver& driver = EmulatedDriver();
  {
    const Context context(driver, 0);
    const ScopedContext scoped(driver, context.get());
    Stream stream(driver);
    const CUstream handle = stream.get();
    Stream moved(std::move(stream));
    CHECK(!stream);
    CHECK_EQ(moved.get(), handle);
    stream = Stream(driver, -1);
    CHECK_EQ(machine.Live().streams, 2);
    stream = std::move(moved);
    CHECK_EQ(stream.get(), handle);
    CHECK_EQ(machine.Live().streams, 1);
    stream.reset();
    stream.reset();
    CHECK_EQ(machine.Live().streams, 0);
    const Stream nothing;
    CHECK(!nothing);
  }
  CHECK_EQ(machine.Complaints(), "");
}

TEST(EveryOwnerFreesItsResource) {
  EmulatedMachine machine;
  const Driver& driver = EmulatedDriver();
  {
    const Context context(driver, 0);
    const ScopedContext scoped(driver, context.get());
    const Stream stream(driver);
    const Event event(driver);
    const DeviceMemory memory(driver, 4096);
    const HostMemory host(driver, 4096);
    const unsigned char image[64] = {};
    const Library library(driver, image);
    CHECK(stream && event && memory && host && library);
    CHECK_EQ(memory.size_bytes(), 4096);
    const EmulatedObjects live = machine.Live();
    CHECK_EQ(live.Describe(), (EmulatedObjects{.contexts = 1,
                                               .streams = 1,
                                               .events = 1,
                                               .allocations = 1,
                                               .host_allocations = 1,
                                               .libraries = 1}
                                   .Describe()));
  }
  CHECK_EQ(machine.Complaints(), "");
}

TEST(AResourceThatAnotherThreadDestroysIsFreed) {
  EmulatedMachine machine;
  const Driver& driver = EmulatedDriver();
  {
    const Context context(driver, 0);
    Stream stream;
    Event event;
    DeviceMemory memory;
    HostMemory host;
    {
      const ScopedContext scoped(driver, context.get());
      stream = Stream(driver);
      event = Event(driver);
      memory = DeviceMemory(driver, 64);
      host = HostMemory(driver, 64);
    }
    std::thread([stream = std::move(stream), event = std::move(event),
                 memory = std::move(memory), host = std::move(host)] {
    }).join();
    CHECK_EQ(machine.Live().Describe(), EmulatedObjects{.contexts = 1}.Describe());
  }
  CHECK_EQ(machine.Complaints(), "");
}

TEST(HostMemoryHoldsZerosAndIsSeenByTheDevice) {
  EmulatedMachine machine;
  const Driver& driver = EmulatedDriver();
  const Context context(driver, 0);
  const ScopedContext scoped(driver, context.get());
  const HostMemory host(driver, 64);
  const Stream stream(driver);
  const auto* words = static_cast<const uint32_t*>(host.get());
  CHECK_EQ(words[0], 0u);
  CHECK_EQ(words[15], 0u);
  Check(driver, driver.MemsetD32Async(host.device(), 7, 16, stream.get()),
        "cuMemsetD32Async");
  Check(driver, driver.StreamSynchronize(stream.get()), "cuStreamSynchronize");
  CHECK_EQ(words[0], 7u);
  CHECK_EQ(words[15], 7u);
}

TEST(MemoryOfAStreamIsFreedAfterItsLastUse) {
  EmulatedMachine machine({.max_delay_us = 1000});
  const Driver& driver = EmulatedDriver();
  {
    const Context context(driver, 0);
    const ScopedContext scoped(driver, context.get());
    const Stream stream(driver);
    {
      const StreamMemory memory(driver, 64, stream.get());
      CHECK_EQ(machine.Live().allocations, 1);
      Check(driver, driver.MemsetD32Async(memory.get(), 7, 16, stream.get()),
            "cuMemsetD32Async");
    }
    Check(driver, driver.StreamSynchronize(stream.get()), "cuStreamSynchronize");
    CHECK_EQ(machine.Live().allocations, 0);
    machine.Fail("MemAllocAsync", CUDA_ERROR_OUT_OF_MEMORY);
    CHECK_THROWS(StreamMemory(driver, 64, stream.get()),
                 "cuMemAllocAsync: CUDA_ERROR_OUT_OF_MEMORY");
  }
  CHECK_EQ(machine.Complaints(), "");
}

TEST(AConstructorThatFailsFreesItsResources) {
  EmulatedMachine machine;
  const Driver& driver = EmulatedDriver();
  {
    const Context context(driver, 0);
    const ScopedContext scoped(driver, context.get());
    machine.Fail("MemHostGetDevicePointer", CUDA_ERROR_INVALID_VALUE);
    CHECK_THROWS(HostMemory(driver, 64),
                 "cuMemHostGetDevicePointer: CUDA_ERROR_INVALID_VALUE");
    machine.Fail("MemAlloc", CUDA_ERROR_OUT_OF_MEMORY);
    CHECK_THROWS(DeviceMemory(driver, 64), "cuMemAlloc: CUDA_ERROR_OUT_OF_MEMORY");
    const unsigned char image[64] = {};
    CHECK_THROWS(Library(driver, image).Function("jax_ub_nothing"),
                 "cuLibraryGetKernel of jax_ub_nothing");
  }
  CHECK_EQ(machine.Complaints(), "");
}

}  // namespace
}  // namespace jax_ub

CHECK_MAIN()
