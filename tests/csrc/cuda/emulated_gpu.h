// What tests of the emulated driver use it with: a device, kernels, a stream that waits
// until the test says so.
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

// A device whose context is current, and what is enqueued on it. Throws where a call fails
// that must not.
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
  // The first stream goes on after what the second one has been given.
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

// The project's kernels.
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

// Flags in host memory: kernels that wait for a flag, and the test or a kernel that sets it.
class EmulatedGate {
 public:
  explicit EmulatedGate(const EmulatedLibrary& library)
      : library_(library), memory_(EmulatedDriver(), 4096) {}

  // Waits until Open.
  void Wait(CUstream stream) const {
    WaitParams params = {};
    params.own = words();
    params.flag = params.announced = At(kFlag);
    params.timeout_ns = uint64_t{20'000'000'000};
    params.ahead = 1;
    Check(EmulatedDriver(), library_.Launch(kWaitKernel, stream, params), "launch");
  }
  void Open() {
    std::atomic_ref(*Word(kFlag)).store(kTagMask + 1, std::memory_order_release);
  }
  // Opens it from a stream.
  void Signal(CUstream stream) const {
    SignalParams params = {};
    params.own = words();
    params.num_targets = 1;
    params.targets[0] = {At(kFlag), At(kPeerPoison)};
    Check(EmulatedDriver(), library_.Launch(kSignalKernel, stream, params), "launch");
  }
  void Close() { std::atomic_ref(*Word(kFlag)).store(0, std::memory_order_release); }
  // Whether a wait ended otherwise.
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
