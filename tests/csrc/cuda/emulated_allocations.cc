// Emulates the driver functions that allocate device memory, and host memory that
// devices can access.
#include <utility>

#include "cuda/emulated_machine.h"

namespace jax_ub::emulated {

namespace {

CUresult BeginMemoryCall(Call& call) {
  if (const CUresult refused = call.RefuseInCapture()) return refused;
  if (call.machine.options.memory_calls_synchronize) call.AwaitDevice(call.device());
  return CUDA_SUCCESS;
}

// Allocates memory at new addresses; returns nullptr if none are left.
SharedRegion Allocate(Call& call, Region::Kind kind, size_t size_bytes) {
  auto region = std::make_shared<Region>();
  region->kind = kind;
  region->device = call.device();
  region->size_bytes = static_cast<int64_t>(size_bytes);
  region->address = Memory::Reserve(region->size_bytes, 1);
  if (region->address == 0) return nullptr;
  region->file = MemoryFile::Make(call.machine.options.first_device + call.device(),
                                  region->size_bytes);
  call.machine.memory.Add(region, true);
  return region;
}

CUresult Free(Call& call, uint64_t address, Region::Kind kind, const char* name) {
  Memory& memory = call.machine.memory;
  const SharedRegion region = memory.Find(address, kind);
  if (region == nullptr) {
    call.Violate(std::string(name) + " of memory that is not there");
    return CUDA_ERROR_INVALID_VALUE;
  }
  if (region->num_uses > 0) {
    call.Violate(std::string(name) + " of memory that " +
                 std::to_string(region->num_uses) + " operations still use");
  }
  memory.Remove(address);
  return CUDA_SUCCESS;
}

CUresult MemAlloc(CUdeviceptr* pointer, size_t size_bytes) {
  return RunInContext("MemAlloc", [&](Call& call) {
    if (pointer == nullptr || size_bytes == 0) return CUDA_ERROR_INVALID_VALUE;
    if (const CUresult refused = BeginMemoryCall(call)) return refused;
    if (static_cast<int64_t>(size_bytes) > FreeBytes(call.machine, call.device())) {
      return CUDA_ERROR_OUT_OF_MEMORY;
    }
    const SharedRegion region = Allocate(call, Region::Kind::kDevice, size_bytes);
    if (region == nullptr) return CUDA_ERROR_OUT_OF_MEMORY;
    *pointer = region->address;
    return CUDA_SUCCESS;
  });
}

CUresult MemFree(CUdeviceptr pointer) {
  return RunInContext("MemFree", [&](Call& call) {
    if (const CUresult refused = BeginMemoryCall(call)) return refused;
    if (pointer == 0) return CUDA_SUCCESS;
    return Free(call, pointer, Region::Kind::kDevice, "cuMemFree");
  });
}

// Allocates from a pool whose memory other devices cannot access; does not wait.
CUresult MemAllocAsync(CUdeviceptr* pointer, size_t size_bytes, CUstream handle) {
  return RunInContext("MemAllocAsync", [&](Call& call) {
    if (pointer == nullptr || size_bytes == 0) return CUDA_ERROR_INVALID_VALUE;
    const Stream* const stream = call.FindStream(handle);
    if (stream == nullptr) return CUDA_ERROR_INVALID_HANDLE;
    // In a capture this would be an allocation node, which is not emulated.
    if (stream->capture != nullptr) return CUDA_ERROR_NOT_SUPPORTED;
    if (static_cast<int64_t>(size_bytes) > FreeBytes(call.machine, call.device())) {
      return CUDA_ERROR_OUT_OF_MEMORY;
    }
    const SharedRegion region = Allocate(call, Region::Kind::kDevice, size_bytes);
    if (region == nullptr) return CUDA_ERROR_OUT_OF_MEMORY;
    *pointer = region->address;
    return CUDA_SUCCESS;
  });
}

CUresult MemFreeAsync(CUdeviceptr pointer, CUstream stream) {
  return RunInContext("MemFreeAsync", [&](Call& call) {
    Machine& machine = call.machine;
    if (machine.memory.Find(pointer, Region::Kind::kDevice) == nullptr) {
      call.Violate("cuMemFreeAsync of memory that is not there");
      return CUDA_ERROR_INVALID_VALUE;
    }
    Operation operation;
    operation.name = "cuMemFreeAsync";
    operation.kind = Operation::Kind::kFree;
    operation.run = [&machine, pointer] {
      const std::lock_guard lock(machine.mutex);
      machine.memory.Remove(pointer);
    };
    return Enqueue(call, stream, std::move(operation));
  });
}

CUresult MemHostAlloc(void** pointer, size_t size_bytes, unsigned flags) {
  return RunInContext("MemHostAlloc", [&](Call& call) {
    constexpr unsigned kKnown = CU_MEMHOSTALLOC_PORTABLE | CU_MEMHOSTALLOC_DEVICEMAP |
                                CU_MEMHOSTALLOC_WRITECOMBINED;
    if (pointer == nullptr || size_bytes == 0 || (flags & ~kKnown) != 0) {
      return CUDA_ERROR_INVALID_VALUE;
    }
    if (const CUresult refused = BeginMemoryCall(call)) return refused;
    const SharedRegion region = Allocate(call, Region::Kind::kHost, size_bytes);
    if (region == nullptr) return CUDA_ERROR_OUT_OF_MEMORY;
    *pointer = reinterpret_cast<void*>(region->address);
    return CUDA_SUCCESS;
  });
}

CUresult MemHostGetDevicePointer(CUdeviceptr* device, void* host, unsigned flags) {
  return RunInContext("MemHostGetDevicePointer", [&](Call& call) {
    const auto address = reinterpret_cast<uint64_t>(host);
    const SharedRegion region = call.machine.memory.Around(address);
    if (device == nullptr || flags != 0 || region == nullptr ||
        region->kind != Region::Kind::kHost) {
      return CUDA_ERROR_INVALID_VALUE;
    }
    *device = address;
    return CUDA_SUCCESS;
  });
}

CUresult MemFreeHost(void* pointer) {
  return RunInContext("MemFreeHost", [&](Call& call) {
    if (const CUresult refused = BeginMemoryCall(call)) return refused;
    return Free(call, reinterpret_cast<uint64_t>(pointer), Region::Kind::kHost,
                "cuMemFreeHost");
  });
}

}  // namespace

void FillMemory(Driver& driver) {
  driver.MemAlloc = MemAlloc;
  driver.MemFree = MemFree;
  driver.MemAllocAsync = MemAllocAsync;
  driver.MemFreeAsync = MemFreeAsync;
  driver.MemHostAlloc = MemHostAlloc;
  driver.MemHostGetDevicePointer = MemHostGetDevicePointer;
  driver.MemFreeHost = MemFreeHost;
}

}  // namespace jax_ub::emulated
