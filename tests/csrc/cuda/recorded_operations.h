// Records the operations on a rank's lanes instead of running them, with a driver that
// stores launches and copies.
#pragma once

#include <cstdint>
#include <cstring>
#include <tuple>
#include <vector>

#include "cuda/emulated_kernels.h"
#include "platform/cuda/driver.h"
#include "schedule/schedule.h"

namespace jax_ub {

// The number of a slice that a call puts into slots. It is the content of the slot in
// the model.
using PieceId = uint8_t;
using Piece = std::tuple<int, Payload, int, int, int>;  // call, payload, chunk, split,
                                                        // sender of a partial or kNone

// A range of a rank's slots, and the piece in it.
struct Content {
  CUdeviceptr slots = 0;
  int64_t size_bytes = 0;
  PieceId piece = 0;
};

// Kernels and copies run in the order of the communication lane. Concurrent users of
// slots may run at any time after the operation that they follow.
struct Operation {
  const EmulatedKernel* kernel = nullptr;
  std::vector<std::byte> params;
  unsigned num_blocks = 0;
  unsigned num_threads = 0;
  unsigned cluster_size = 0;    // 0: not asked for
  std::vector<Content> reads;   // first
  std::vector<Content> writes;  // of a copy: one
  uint32_t needs = 0;           // concurrent operations that must be done before: bits

  bool uses_slots() const { return !reads.empty() || !writes.empty(); }
};

// A GEMM or sum on another lane.
struct ConcurrentWork {
  size_t after = 0;  // this many operations of the lane
  std::vector<Content> reads;
  std::vector<Content> writes;
};

struct RankProgram {
  std::vector<Operation> lane;
  std::vector<ConcurrentWork> concurrent;
};

inline constexpr int kRecordedSms = 2;
// The number of a device is its compute capability: device 80 has 8.0.
inline constexpr CUdevice kAmpere = 80;
inline constexpr CUdevice kHopper = 90;

// A driver whose streams are vectors to which launches and copies are appended.
inline Driver RecordingDriver() {
  Driver driver = {};
  driver.LibraryLoadData = [](CUlibrary* library, const void* image, CUjit_option*,
                              void**, unsigned, CUlibraryOption*, void**, unsigned) {
    *library = reinterpret_cast<CUlibrary>(const_cast<void*>(image));
    return CUDA_SUCCESS;
  };
  driver.LibraryUnload = [](CUlibrary) { return CUDA_SUCCESS; };
  driver.LibraryGetKernel = [](CUkernel* kernel, CUlibrary, const char* name) {
    const EmulatedKernel* found = FindEmulatedKernel(name);
    *kernel = reinterpret_cast<CUkernel>(const_cast<EmulatedKernel*>(found));
    return CUDA_SUCCESS;
  };
  driver.KernelGetFunction = [](CUfunction* function, CUkernel kernel) {
    *function = reinterpret_cast<CUfunction>(kernel);
    return CUDA_SUCCESS;
  };
  driver.LaunchKernelEx = [](const CUlaunchConfig* config, CUfunction function,
                             void** arguments, void**) {
    Operation launch;
    launch.kernel = reinterpret_cast<const EmulatedKernel*>(function);
    const auto* params = static_cast<const std::byte*>(arguments[0]);
    launch.params.assign(params, params + launch.kernel->params_bytes);
    launch.num_blocks = config->gridDimX;
    launch.num_threads = config->blockDimX;
    for (unsigned i = 0; i < config->numAttrs; ++i) {
      if (config->attrs[i].id == CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION) {
        launch.cluster_size = config->attrs[i].value.clusterDim.x;
      }
    }
    reinterpret_cast<std::vector<Operation>*>(config->hStream)->push_back(launch);
    return CUDA_SUCCESS;
  };
  driver.MemcpyAsync = [](CUdeviceptr to, CUdeviceptr, size_t bytes, CUstream stream) {
    Operation copy;
    copy.writes = {{to, static_cast<int64_t>(bytes), 0}};
    reinterpret_cast<std::vector<Operation>*>(stream)->push_back(copy);
    return CUDA_SUCCESS;
  };
  driver.DeviceGetAttribute = [](int* value, CUdevice_attribute attribute,
                                 CUdevice device) {
    *value = attribute == CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR ? device / 10
                                                                       : kRecordedSms;
    return CUDA_SUCCESS;
  };
  return driver;
}

}  // namespace jax_ub
