// Helpers for tests of the emulated driver: a device, kernels, and a stream that waits
// until the test opens a gate.
#pragma once

#include <atomic>
#include <cstring>
#include <map>
#include <string>
#include <vector>

#include "check.h"
#include "cuda/emulated_driver.h"
#include "platform/cuda/owners.h"
#include "reduce/cuda/sum_params.h"
#include "transport/cuda/flag_params.h"

namespace jax_ub {

// A device whose context is current, with functions that enqueue work on it. A call
// that must succeed throws if it fails.
class EmulatedGpu {
 public:
  explicit EmulatedGpu(int ordinal = 0)
      : context_(driver(), ordinal), scope_(driver(), context_.get()) {}

  static const Driver& driver() { return EmulatedDriver(); }
  CUcontext context() const { return context_.get(); }

  static void Fill(CUstream stream, CUdeviceptr to, uint32_t value, size_t count) {
    Check(driver(), driver().MemsetD32Async(to, value, count, stream), "fill");
  }
  static void Copy(CUstream stream, CUdeviceptr to, CUdeviceptr from, size_t size) {
    Check(driver(), driver().MemcpyAsync(to, from, size, stream), "copy");
  }
  // Makes the stream `waiting` wait for the work that is on the stream `recorded` so
  // far.
  static void Join(CUstream waiting, const Event& event, CUstream recorded) {
    Check(driver(), driver().EventRecord(event.get(), recorded), "record");
    Check(driver(), driver().StreamWaitEvent(waiting, event.get(), 0), "wait");
  }
  static void Synchronize(CUstream stream) {
    Check(driver(), driver().StreamSynchronize(stream), "synchronize");
  }
  static std::vector<uint32_t> Read(CUstream stream, CUdeviceptr from, size_t count) {
    std::vector<uint32_t> words(count);
    Copy(stream, reinterpret_cast<CUdeviceptr>(words.data()), from, count * 4);
    return words;
  }

 private:
  Context context_;
  ScopedContext scope_;
};

// Loads the project's kernels.
class EmulatedLibrary {
 public:
  EmulatedLibrary() : library_(EmulatedDriver(), kImage) {}

  template <typename Params>
  CUresult Launch(const char* kernel, CUstream stream, Params params) const {
    CUlaunchConfig config = {};
    config.gridDimX = config.gridDimY = config.gridDimZ = 1;
    config.blockDimX = 32;
    config.blockDimY = config.blockDimZ = 1;
    config.hStream = stream;
    void* pointers[] = {&params};
    return EmulatedDriver().LaunchKernelEx(&config, library_.Function(kernel), pointers,
                                           nullptr);
  }

 private:
  static constexpr unsigned char kImage[] = "any";
  Library library_;
};

// A flag in host memory, with kernels that wait for it and set it. The test may also
// set it.
class EmulatedGate {
 public:
  explicit EmulatedGate(const EmulatedLibrary& library)
      : library_(library), memory_(EmulatedDriver(), 4096) {}

  // Enqueues a kernel that waits until the gate is open.
  void Wait(CUstream stream) const {
    WaitParams params = {};
    params.waiting.own = words();
    params.waiting.timeout_ns = uint64_t{20'000'000'000};
    params.ahead = 1;
    params.num_flags = 1;
    params.flags[0].flag = params.flags[0].announced = At(kFlag);
    Check(EmulatedDriver(), library_.Launch(kWaitKernel, stream, params), "launch");
  }
  void Open() {
    std::atomic_ref(*Word(kFlag)).store(kTagMask + 1, std::memory_order_release);
  }
  // Enqueues a kernel that opens the gate.
  void Signal(CUstream stream) const {
    SignalParams params = {};
    params.own = words();
    params.signals = {1, {{At(kFlag), At(kPeerPoison)}}};
    Check(EmulatedDriver(), library_.Launch(kSignalKernel, stream, params), "launch");
  }
  void Close() { std::atomic_ref(*Word(kFlag)).store(0, std::memory_order_release); }
  bool is_open() const {
    return std::atomic_ref(*Word(kFlag)).load(std::memory_order_acquire) != 0;
  }
  // Returns whether a wait ended without the gate being open.
  bool has_failed() const {
    return std::atomic_ref(*Word(kFailed)).load(std::memory_order_acquire) != 0;
  }

 private:
  enum Place { kFlag, kEpoch, kFailed, kPoison, kPeerPoison, kError };

  RankWords words() const { return {At(kEpoch), At(kFailed), At(kPoison), At(kError)}; }
  uint64_t At(Place place) const { return memory_.device() + place * 128; }
  uint64_t* Word(Place place) const { return reinterpret_cast<uint64_t*>(At(place)); }

  const EmulatedLibrary& library_;
  HostMemory memory_;
};

}  // namespace jax_ub
