// Streams, events and memory of the emulated driver: what CUDA orders is ordered, what it
// refuses is refused.
#include <vector>

#include "check.h"
#include "cuda/emulated_driver.h"
#include "platform/cuda/owners.h"

using namespace jax_ub;

namespace {

const Driver& driver = EmulatedDriver();

// A device with memory that counts what was copied into it.
struct Device {
  explicit Device(int ordinal = 0)
      : context(driver, ordinal), scope(driver, context.get()) {}
  Context context;
  ScopedContext scope;
};

uint32_t* Words(const DeviceMemory& memory) {
  return reinterpret_cast<uint32_t*>(memory.get());
}

void Fill(CUstream stream, CUdeviceptr to, uint32_t value, size_t count) {
  Check(driver, driver.MemsetD32Async(to, value, count, stream), "fill");
}

void Copy(CUstream stream, CUdeviceptr to, CUdeviceptr from, size_t size) {
  Check(driver, driver.MemcpyAsync(to, from, size, stream), "copy");
}

void Join(CUstream waiting, CUevent event, CUstream recorded) {
  Check(driver, driver.EventRecord(event, recorded), "record");
  Check(driver, driver.StreamWaitEvent(waiting, event, 0), "wait");
}

}  // namespace

TEST(AStreamDoesWhatItIsGivenInOrder) {
  for (const uint64_t seed : {1u, 2u, 3u}) {
    EmulatedMachine machine({.seed = seed, .max_delay_us = 100});
    {
      const Device device;
      const Stream stream(driver, 0);
      const DeviceMemory memory(driver, 4096);
      for (uint32_t i = 0; i < 20; ++i) Fill(stream.get(), memory.get(), i, 1024);
      Check(driver, driver.StreamSynchronize(stream.get()), "synchronize");
      for (int i = 0; i < 1024; ++i) CHECK_EQ(Words(memory)[i], 19u);
    }
    CHECK_EQ(machine.Complaints(), "");
  }
}

TEST(EventsOrderStreams) {
  for (uint64_t seed = 1; seed <= 5; ++seed) {
    EmulatedMachine machine({.seed = seed, .max_delay_us = 300});
    {
      const Device device;
      const Stream first(driver, 0), second(driver, 0);
      const Event there(driver), back(driver);
      const DeviceMemory from(driver, 4096), to(driver, 4096);
      for (uint32_t i = 0; i < 10; ++i) {
        Fill(first.get(), from.get(), i, 1024);
        Join(second.get(), there.get(), first.get());
        Copy(second.get(), to.get(), from.get(), 4096);
        Join(first.get(), back.get(), second.get());
      }
      Check(driver, driver.StreamSynchronize(second.get()), "synchronize");
      for (int i = 0; i < 1024; ++i) CHECK_EQ(Words(to)[i], 9u);
    }
    CHECK_EQ(machine.Complaints(), "");
  }
}
CHECK_MAIN()
