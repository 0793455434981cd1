#include "platform/cuda/driver.h"

#include <cudaTypedefs.h>
#include <dlfcn.h>

#include <cstddef>
#include <cstring>
#include <iterator>
#include <string>
#include <type_traits>

#include "platform/error.h"

namespace jax_ub {

namespace {

// Oldest supported version, CUDA 12.0: the first one that has cuLibraryLoadData.
constexpr int kOldestVersion = 12000;

// A driver function, and the oldest API version in which the function has the signature
// that cuda.h declares. In newer versions, a function of the same name may have other
// arguments.
struct Symbol {
  size_t member;
  const char* name;
  int version;
  bool optional;
};
template <typename Member, typename Declared>
constexpr Symbol MakeSymbol(size_t member,
                            const char* name,
                            int version,
                            bool optional = false) {
  static_assert(std::is_same_v<Member, Declared>, "cuda.h has another version");
  return {member, name, version, optional};
}
// Pastes the parameter `name` into other tokens without expanding it, because cuda.h
// defines some function names as macros.
#define JAX_UB_SYMBOL(member, name, version, ...)                \
  MakeSymbol<decltype(Driver::member), PFN_##name##_v##version>( \
      offsetof(Driver, member), #name, version __VA_OPT__(, ) __VA_ARGS__)
constexpr Symbol kSymbols[] = {
    JAX_UB_SYMBOL(Init, cuInit, 2000),
    JAX_UB_SYMBOL(DriverGetVersion, cuDriverGetVersion, 2020),
    JAX_UB_SYMBOL(GetErrorName, cuGetErrorName, 6000),
    JAX_UB_SYMBOL(GetErrorString, cuGetErrorString, 6000),
    JAX_UB_SYMBOL(DeviceGet, cuDeviceGet, 2000),
    JAX_UB_SYMBOL(DeviceGetCount, cuDeviceGetCount, 2000),
    JAX_UB_SYMBOL(DeviceGetAttribute, cuDeviceGetAttribute, 2000),
    JAX_UB_SYMBOL(DeviceGetName, cuDeviceGetName, 2000),
    JAX_UB_SYMBOL(DeviceGetUuid, cuDeviceGetUuid, 11040),
    JAX_UB_SYMBOL(DeviceTotalMem, cuDeviceTotalMem, 3020),
    JAX_UB_SYMBOL(DeviceCanAccessPeer, cuDeviceCanAccessPeer, 4000),
    JAX_UB_SYMBOL(DevicePrimaryCtxRetain, cuDevicePrimaryCtxRetain, 7000),
    JAX_UB_SYMBOL(DevicePrimaryCtxRelease, cuDevicePrimaryCtxRelease, 11000),
    JAX_UB_SYMBOL(CtxSetCurrent, cuCtxSetCurrent, 4000),
    JAX_UB_SYMBOL(CtxGetCurrent, cuCtxGetCurrent, 4000),
    JAX_UB_SYMBOL(CtxEnablePeerAccess, cuCtxEnablePeerAccess, 4000),
    JAX_UB_SYMBOL(CtxGetStreamPriorityRange, cuCtxGetStreamPriorityRange, 5050),
    JAX_UB_SYMBOL(CtxSynchronize, cuCtxSynchronize, 2000),
    JAX_UB_SYMBOL(StreamCreateWithPriority, cuStreamCreateWithPriority, 5050),
    JAX_UB_SYMBOL(StreamDestroy, cuStreamDestroy, 4000),
    JAX_UB_SYMBOL(StreamSynchronize, cuStreamSynchronize, 2000),
    JAX_UB_SYMBOL(StreamWaitEvent, cuStreamWaitEvent, 3020),
    JAX_UB_SYMBOL(StreamIsCapturing, cuStreamIsCapturing, 10000),
    JAX_UB_SYMBOL(StreamBeginCapture, cuStreamBeginCapture, 10010),
    JAX_UB_SYMBOL(StreamEndCapture, cuStreamEndCapture, 10000),
    JAX_UB_SYMBOL(GraphInstantiate, cuGraphInstantiateWithFlags, 11040),
    JAX_UB_SYMBOL(GraphLaunch, cuGraphLaunch, 10000),
    JAX_UB_SYMBOL(GraphExecDestroy, cuGraphExecDestroy, 10000),
    JAX_UB_SYMBOL(GraphDestroy, cuGraphDestroy, 10000),
    JAX_UB_SYMBOL(EventCreate, cuEventCreate, 2000),
    JAX_UB_SYMBOL(EventRecord, cuEventRecord, 2000),
    JAX_UB_SYMBOL(EventQuery, cuEventQuery, 2000),
    JAX_UB_SYMBOL(EventSynchronize, cuEventSynchronize, 2000),
    JAX_UB_SYMBOL(EventElapsedTime, cuEventElapsedTime, 2000),
    JAX_UB_SYMBOL(EventDestroy, cuEventDestroy, 4000),
    JAX_UB_SYMBOL(MemAlloc, cuMemAlloc, 3020),
    JAX_UB_SYMBOL(MemFree, cuMemFree, 3020),
    JAX_UB_SYMBOL(MemAllocAsync, cuMemAllocAsync, 11020),
    JAX_UB_SYMBOL(MemFreeAsync, cuMemFreeAsync, 11020),
    JAX_UB_SYMBOL(MemHostAlloc, cuMemHostAlloc, 2020),
    JAX_UB_SYMBOL(MemHostGetDevicePointer, cuMemHostGetDevicePointer, 3020),
    JAX_UB_SYMBOL(MemFreeHost, cuMemFreeHost, 2000),
    JAX_UB_SYMBOL(MemcpyAsync, cuMemcpyAsync, 4000),
    JAX_UB_SYMBOL(MemsetD8Async, cuMemsetD8Async, 3020),
    JAX_UB_SYMBOL(MemsetD32Async, cuMemsetD32Async, 3020),
    JAX_UB_SYMBOL(LibraryLoadData, cuLibraryLoadData, 12000),
    JAX_UB_SYMBOL(LibraryGetKernel, cuLibraryGetKernel, 12000),
    JAX_UB_SYMBOL(LibraryUnload, cuLibraryUnload, 12000),
    JAX_UB_SYMBOL(KernelGetFunction, cuKernelGetFunction, 12000),
    JAX_UB_SYMBOL(LaunchKernelEx, cuLaunchKernelEx, 11060),
    JAX_UB_SYMBOL(MemGetAllocationGranularity, cuMemGetAllocationGranularity, 10020),
    JAX_UB_SYMBOL(MemCreate, cuMemCreate, 10020),
    JAX_UB_SYMBOL(MemRelease, cuMemRelease, 10020),
    JAX_UB_SYMBOL(MemAddressReserve, cuMemAddressReserve, 10020),
    JAX_UB_SYMBOL(MemAddressFree, cuMemAddressFree, 10020),
    JAX_UB_SYMBOL(MemMap, cuMemMap, 10020),
    JAX_UB_SYMBOL(MemUnmap, cuMemUnmap, 10020),
    JAX_UB_SYMBOL(MemSetAccess, cuMemSetAccess, 10020),
    JAX_UB_SYMBOL(MemExportToShareableHandle, cuMemExportToShareableHandle, 10020),
    JAX_UB_SYMBOL(MemImportFromShareableHandle, cuMemImportFromShareableHandle, 10020),
    JAX_UB_SYMBOL(IpcGetMemHandle, cuIpcGetMemHandle, 4010),
    JAX_UB_SYMBOL(IpcOpenMemHandle, cuIpcOpenMemHandle, 11000),
    JAX_UB_SYMBOL(IpcCloseMemHandle, cuIpcCloseMemHandle, 4010),
    JAX_UB_SYMBOL(FuncLoad, cuFuncLoad, 12040, true),
    JAX_UB_SYMBOL(MulticastCreate, cuMulticastCreate, 12010, true),
    JAX_UB_SYMBOL(MulticastAddDevice, cuMulticastAddDevice, 12010, true),
    JAX_UB_SYMBOL(MulticastBindMem, cuMulticastBindMem, 12010, true),
    JAX_UB_SYMBOL(MulticastUnbind, cuMulticastUnbind, 12010, true),
    JAX_UB_SYMBOL(MulticastGetGranularity, cuMulticastGetGranularity, 12010, true),
};
#undef JAX_UB_SYMBOL

template <typename Function>
Function As(void* symbol) {
  return reinterpret_cast<Function>(symbol);
}

// Returns "12.4" for 12040.
std::string VersionText(int version) {
  return std::to_string(version / 1000) + "." + std::to_string(version % 1000 / 10);
}

Driver OpenDriver() {
  // Never closes the library, because threads of the driver may run until the process
  // exits.
  static void* const library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr) {
    throw UnsupportedError(
        "there is no NVIDIA driver here: libcuda.so.1 was not found. It comes with "
        "the driver, not with CUDA's packages; a container gets it from its host");
  }
  const Driver driver =
      LoadDriver([](const char* name) { return dlsym(library, name); });
  if (const CUresult result = driver.Init(0); result != CUDA_SUCCESS) {
    throw UnsupportedError("the NVIDIA driver does not start: cuInit: " +
                           DescribeResult(driver, result));
  }
  return driver;
}

}  // namespace

Driver LoadDriver(void* (*find_symbol)(const char* name)) {
  const auto get_version =
      As<decltype(&cuDriverGetVersion)>(find_symbol("cuDriverGetVersion"));
  int version = 0;
  if (get_version == nullptr || get_version(&version) != CUDA_SUCCESS) {
    throw UnsupportedError("libcuda.so.1 does not say its version: is it a driver?");
  }
  const auto get_address = As<CUresult (*)(const char*, void**, int, cuuint64_t,
                                           CUdriverProcAddressQueryResult*)>(
      find_symbol("cuGetProcAddress_v2"));
  if (version < kOldestVersion || get_address == nullptr) {
    throw UnsupportedError("the NVIDIA driver is for CUDA " + VersionText(version) +
                           ", and jax_ub needs one for CUDA " +
                           VersionText(kOldestVersion) + " or newer: update it");
  }
  Driver driver{};
  static_assert(std::size(kSymbols) * sizeof(void*) == sizeof(Driver),
                "a member of Driver is not in kSymbols");
  for (const Symbol& symbol : kSymbols) {
    void* address = nullptr;
    CUdriverProcAddressQueryResult found{};
    const CUresult result = get_address(symbol.name, &address, symbol.version,
                                        CU_GET_PROC_ADDRESS_DEFAULT, &found);
    if (result != CUDA_SUCCESS || address == nullptr) {
      if (symbol.optional) continue;
      throw UnsupportedError("the NVIDIA driver (CUDA " + VersionText(version) +
                             ") has no " + symbol.name + " of CUDA " +
                             VersionText(symbol.version));
    }
    std::memcpy(reinterpret_cast<std::byte*>(&driver) + symbol.member, &address,
                sizeof(address));
  }
  return driver;
}

const Driver& SystemDriver() {
  static const Driver driver = OpenDriver();
  return driver;
}

std::string DescribeResult(const Driver& driver, CUresult result) {
  const char* name = nullptr;
  const char* text = nullptr;
  driver.GetErrorName(result, &name);
  driver.GetErrorString(result, &text);
  return (name != nullptr ? name : "error " + std::to_string(result)) +
         std::string(text != nullptr ? ": " : "") + (text != nullptr ? text : "");
}

void Check(const Driver& driver, CUresult result, const char* what) {
  if (result == CUDA_SUCCESS) return;
  throw SystemError(std::string(what) + ": " + DescribeResult(driver, result));
}

}  // namespace jax_ub
