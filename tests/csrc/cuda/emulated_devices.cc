// Emulates the driver functions for devices, contexts and names of errors.
#include <algorithm>
#include <cstdio>
#include <cstring>
#include <map>

#include "cuda/emulated_machine.h"

namespace jax_ub::emulated {

namespace {

struct ErrorText {
  const char* name;
  const char* text;
};

const ErrorText* FindError(CUresult result) {
#define JAX_UB_ERROR(code, text) \
  {                              \
    code, { #code, text }        \
  }
  static const std::map<CUresult, ErrorText> texts = {
      JAX_UB_ERROR(CUDA_SUCCESS, "no error"),
      JAX_UB_ERROR(CUDA_ERROR_INVALID_VALUE, "invalid argument"),
      JAX_UB_ERROR(CUDA_ERROR_OUT_OF_MEMORY, "out of memory"),
      JAX_UB_ERROR(CUDA_ERROR_NOT_INITIALIZED, "initialization error"),
      JAX_UB_ERROR(CUDA_ERROR_NO_DEVICE, "no CUDA-capable device is detected"),
      JAX_UB_ERROR(CUDA_ERROR_INVALID_DEVICE, "invalid device ordinal"),
      JAX_UB_ERROR(CUDA_ERROR_INVALID_CONTEXT, "invalid device context"),
      JAX_UB_ERROR(CUDA_ERROR_MAP_FAILED, "mapping of buffer object failed"),
      JAX_UB_ERROR(CUDA_ERROR_ALREADY_MAPPED, "resource already mapped"),
      JAX_UB_ERROR(CUDA_ERROR_PEER_ACCESS_UNSUPPORTED,
                   "peer access is not supported between these two devices"),
      JAX_UB_ERROR(CUDA_ERROR_OPERATING_SYSTEM,
                   "OS call failed or not supported on this OS"),
      JAX_UB_ERROR(CUDA_ERROR_INVALID_HANDLE, "invalid resource handle"),
      JAX_UB_ERROR(CUDA_ERROR_ILLEGAL_STATE,
                   "the operation cannot be performed in the present state"),
      JAX_UB_ERROR(CUDA_ERROR_NOT_FOUND, "named symbol not found"),
      JAX_UB_ERROR(CUDA_ERROR_NOT_READY, "device not ready"),
      JAX_UB_ERROR(CUDA_ERROR_ILLEGAL_ADDRESS,
                   "an illegal memory access was encountered"),
      JAX_UB_ERROR(CUDA_ERROR_LAUNCH_FAILED, "unspecified launch failure"),
      JAX_UB_ERROR(CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED,
                   "peer access is already enabled"),
      JAX_UB_ERROR(CUDA_ERROR_NOT_PERMITTED, "operation not permitted"),
      JAX_UB_ERROR(CUDA_ERROR_NOT_SUPPORTED, "operation not supported"),
      JAX_UB_ERROR(CUDA_ERROR_SYSTEM_NOT_READY, "system not yet initialized"),
      JAX_UB_ERROR(CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED,
                   "operation not permitted when stream is capturing"),
      JAX_UB_ERROR(CUDA_ERROR_STREAM_CAPTURE_INVALIDATED,
                   "operation failed due to a previous error during capture"),
      JAX_UB_ERROR(CUDA_ERROR_STREAM_CAPTURE_MERGE,
                   "operation would result in a merge of separate capture sequences"),
      JAX_UB_ERROR(CUDA_ERROR_STREAM_CAPTURE_UNMATCHED,
                   "capture was not ended in the same stream as it began"),
      JAX_UB_ERROR(CUDA_ERROR_STREAM_CAPTURE_UNJOINED,
                   "capturing stream has unjoined work"),
      JAX_UB_ERROR(CUDA_ERROR_STREAM_CAPTURE_ISOLATION,
                   "dependency created on uncaptured work in another stream"),
      JAX_UB_ERROR(
          CUDA_ERROR_STREAM_CAPTURE_IMPLICIT,
          "operation would make the legacy stream depend on a capturing blocking "
          "stream"),
      JAX_UB_ERROR(
          CUDA_ERROR_CAPTURED_EVENT,
          "operation not permitted on an event last recorded in a capturing stream"),
      JAX_UB_ERROR(
          CUDA_ERROR_STREAM_CAPTURE_WRONG_THREAD,
          "attempt to terminate a thread-local capture sequence from another thread"),
      JAX_UB_ERROR(CUDA_ERROR_INVALID_CLUSTER_SIZE, "cluster misconfiguration"),
      JAX_UB_ERROR(CUDA_ERROR_UNKNOWN, "unknown error"),
  };
#undef JAX_UB_ERROR
  const auto found = texts.find(result);
  return found == texts.end() ? nullptr : &found->second;
}

CUresult GetErrorName(CUresult result, const char** name) {
  const ErrorText* const error = FindError(result);
  *name = error != nullptr ? error->name : nullptr;
  return error != nullptr ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

CUresult GetErrorString(CUresult result, const char** text) {
  const ErrorText* const error = FindError(result);
  *text = error != nullptr ? error->text : nullptr;
  return error != nullptr ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

int AttributeOf(const EmulatedOptions& options, CUdevice_attribute attribute) {
  const auto chosen = options.attributes.find(attribute);
  if (chosen != options.attributes.end()) return chosen->second;
  static const std::map<CUdevice_attribute, int> kDefaults = {
      {CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR, 9},
      {CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR, 0},
      {CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT, kNumProcessors},
      {CU_DEVICE_ATTRIBUTE_MAX_THREADS_PER_BLOCK, 1024},
      {CU_DEVICE_ATTRIBUTE_MAX_PITCH, 2147483647},
      {CU_DEVICE_ATTRIBUTE_WARP_SIZE, 32},
      {CU_DEVICE_ATTRIBUTE_UNIFIED_ADDRESSING, 1},
      {CU_DEVICE_ATTRIBUTE_CAN_MAP_HOST_MEMORY, 1},
      {CU_DEVICE_ATTRIBUTE_STREAM_PRIORITIES_SUPPORTED, 1},
      {CU_DEVICE_ATTRIBUTE_ASYNC_ENGINE_COUNT, 3},
      {CU_DEVICE_ATTRIBUTE_CONCURRENT_KERNELS, 1},
      {CU_DEVICE_ATTRIBUTE_COOPERATIVE_LAUNCH, 1},
  };
  switch (attribute) {
    case CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED:
      return options.has_vmm;
    case CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED:
      return options.has_vmm && options.has_fd;
    case CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_FABRIC_SUPPORTED:
      return options.has_vmm && options.has_fabric;
    case CU_DEVICE_ATTRIBUTE_MULTICAST_SUPPORTED:
      return options.has_vmm && options.has_multicast;
    default:
      break;
  }
  const auto found = kDefaults.find(attribute);
  return found == kDefaults.end() ? 0 : found->second;
}

bool IsDevice(const Call& call, CUdevice device) {
  return device >= 0 && device < call.machine.options.num_devices;
}

// Returns the context of a device. Its value contains the numbers of the machine and of
// the device.
CUcontext ContextOf(const Call& call, int device) {
  return reinterpret_cast<CUcontext>(call.machine.generation * 0x1000 + 0x10 + device);
}

}  // namespace

int DeviceOf(const Call& call, CUcontext context) {
  const uint64_t device = reinterpret_cast<uint64_t>(context) -
                          reinterpret_cast<uint64_t>(ContextOf(call, 0));
  return device < call.machine.contexts.size() &&
                 call.machine.contexts[device].num_retained > 0
             ? static_cast<int>(device)
             : -1;
}

namespace {

CUresult Init(unsigned flags) {
  return flags == 0 ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

CUresult DriverGetVersion(int* version) {
  return Run("DriverGetVersion", [&](Call& call) {
    *version = call.machine.options.driver_version;
    return CUDA_SUCCESS;
  });
}

CUresult DeviceGetCount(int* count) {
  return Run("DeviceGetCount", [&](Call& call) {
    *count = call.machine.options.num_devices;
    return CUDA_SUCCESS;
  });
}

CUresult DeviceGet(CUdevice* device, int ordinal) {
  return Run("DeviceGet", [&](Call& call) {
    if (!IsDevice(call, ordinal)) return CUDA_ERROR_INVALID_DEVICE;
    *device = ordinal;
    return CUDA_SUCCESS;
  });
}

CUresult DeviceGetAttribute(int* value, CUdevice_attribute attribute, CUdevice device) {
  return Run("DeviceGetAttribute", [&](Call& call) {
    if (!IsDevice(call, device)) return CUDA_ERROR_INVALID_DEVICE;
    if (attribute <= 0 || attribute >= CU_DEVICE_ATTRIBUTE_MAX) {
      return CUDA_ERROR_INVALID_VALUE;
    }
    *value = AttributeOf(call.machine.options, attribute);
    return CUDA_SUCCESS;
  });
}

CUresult DeviceGetName(char* name, int size, CUdevice device) {
  return Run("DeviceGetName", [&](Call& call) {
    if (!IsDevice(call, device)) return CUDA_ERROR_INVALID_DEVICE;
    std::snprintf(name, size, "Emulated GPU");
    return CUDA_SUCCESS;
  });
}

CUresult DeviceGetUuid(CUuuid* uuid, CUdevice device) {
  return Run("DeviceGetUuid", [&](Call& call) {
    if (!IsDevice(call, device)) return CUDA_ERROR_INVALID_DEVICE;
    std::memset(uuid->bytes, 0, sizeof(uuid->bytes));
    uuid->bytes[0] = 'E';
    uuid->bytes[15] = static_cast<char>(call.machine.options.first_device + device);
    return CUDA_SUCCESS;
  });
}

CUresult DeviceTotalMem(size_t* size_bytes, CUdevice device) {
  return Run("DeviceTotalMem", [&](Call& call) {
    if (!IsDevice(call, device)) return CUDA_ERROR_INVALID_DEVICE;
    *size_bytes = call.machine.options.device_memory_bytes;
    return CUDA_SUCCESS;
  });
}

CUresult DeviceCanAccessPeer(int* can_access, CUdevice device, CUdevice peer) {
  return Run("DeviceCanAccessPeer", [&](Call& call) {
    if (!IsDevice(call, device) || !IsDevice(call, peer)) {
      return CUDA_ERROR_INVALID_DEVICE;
    }
    *can_access = call.machine.CanAccessPeer(device, peer);
    return CUDA_SUCCESS;
  });
}

CUresult DevicePrimaryCtxRetain(CUcontext* context, CUdevice device) {
  return Run("DevicePrimaryCtxRetain", [&](Call& call) {
    if (!IsDevice(call, device)) return CUDA_ERROR_INVALID_DEVICE;
    ++call.machine.contexts[device].num_retained;
    *context = ContextOf(call, device);
    return CUDA_SUCCESS;
  });
}

// Returns a description of the objects that would be destroyed with the context. Shared
// memory does not belong to a context.
std::string LeftOf(const Call& call, int device) {
  EmulatedObjects left;
  for (const auto& [handle, stream] : call.machine.streams) {
    left.streams += stream->device == device;
  }
  for (const auto& [handle, event] : call.machine.events) {
    left.events += event->device == device;
  }
  for (const auto& [address, region] : call.machine.memory.regions()) {
    if (region->device != device) continue;
    left.allocations += region->kind == Region::Kind::kDevice;
    left.host_allocations += region->kind == Region::Kind::kHost;
    left.ipc += region->kind == Region::Kind::kIpc;
  }
  return left.Describe();
}

CUresult DevicePrimaryCtxRelease(CUdevice device) {
  return Run("DevicePrimaryCtxRelease", [&](Call& call) {
    if (!IsDevice(call, device)) return CUDA_ERROR_INVALID_DEVICE;
    Context& context = call.machine.contexts[device];
    if (context.num_retained == 0) {
      call.Violate("cuDevicePrimaryCtxRelease of a context that is not retained");
      return CUDA_ERROR_INVALID_CONTEXT;
    }
    if (--context.num_retained > 0) return CUDA_SUCCESS;
    context.peers.clear();
    if (const std::string left = LeftOf(call, device); !left.empty()) {
      call.Violate("the context of device " + std::to_string(device) +
                   " ended before its " + left);
    }
    return CUDA_SUCCESS;
  });
}

CUresult CtxSetCurrent(CUcontext context) {
  return Run("CtxSetCurrent", [&](Call& call) {
    const int device = context == nullptr ? -1 : DeviceOf(call, context);
    if (context != nullptr && device < 0) return CUDA_ERROR_INVALID_CONTEXT;
    SetCurrentDevice(device);
    return CUDA_SUCCESS;
  });
}

CUresult CtxGetCurrent(CUcontext* context) {
  return Run("CtxGetCurrent", [&](Call& call) {
    const int device = CurrentDevice(call.machine);
    *context = device < 0 ? nullptr : ContextOf(call, device);
    return CUDA_SUCCESS;
  });
}

CUresult CtxEnablePeerAccess(CUcontext peer_context, unsigned flags) {
  return RunInContext("CtxEnablePeerAccess", [&](Call& call) {
    const int peer = DeviceOf(call, peer_context);
    if (flags != 0) return CUDA_ERROR_INVALID_VALUE;
    if (peer < 0) return CUDA_ERROR_INVALID_CONTEXT;
    if (!call.machine.CanAccessPeer(call.device(), peer)) {
      return CUDA_ERROR_PEER_ACCESS_UNSUPPORTED;
    }
    const bool is_new = call.machine.contexts[call.device()].peers.insert(peer).second;
    return is_new ? CUDA_SUCCESS : CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED;
  });
}

}  // namespace

void FillDevices(Driver& driver) {
  driver.Init = Init;
  driver.DriverGetVersion = DriverGetVersion;
  driver.GetErrorName = GetErrorName;
  driver.GetErrorString = GetErrorString;
  driver.DeviceGet = DeviceGet;
  driver.DeviceGetCount = DeviceGetCount;
  driver.DeviceGetAttribute = DeviceGetAttribute;
  driver.DeviceGetName = DeviceGetName;
  driver.DeviceGetUuid = DeviceGetUuid;
  driver.DeviceTotalMem = DeviceTotalMem;
  driver.DeviceCanAccessPeer = DeviceCanAccessPeer;
  driver.DevicePrimaryCtxRetain = DevicePrimaryCtxRetain;
  driver.DevicePrimaryCtxRelease = DevicePrimaryCtxRelease;
  driver.CtxSetCurrent = CtxSetCurrent;
  driver.CtxGetCurrent = CtxGetCurrent;
  driver.CtxEnablePeerAccess = CtxEnablePeerAccess;
}

}  // namespace jax_ub::emulated
