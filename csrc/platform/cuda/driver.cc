#include "platform/cuda/driver.h"

#include <dlfcn.h>

#include <cstddef>
#include <cstring>
#include <iterator>
#include <string>

#include "platform/error.h"

namespace jax_ub {

namespace {

// CUDA 12.0, the first version with cuLibraryLoadData.
constexpr int kOldestVersion = 12000;

// A driver function and the oldest API version at which its signature matches the
// declaration in cuda.h. Newer versions with the same name may take different
// arguments.
struct Symbol {
  size_t member;
  const char* name;
  int version;
  bool optional = false;
};
constexpr Symbol kSymbols[] = {
    {offsetof(Driver, Init), "cuInit", 2000},
    {offsetof(Driver, DriverGetVersion), "cuDriverGetVersion", 2020},
    {offsetof(Driver, GetErrorName), "cuGetErrorName", 6000},
    {offsetof(Driver, GetErrorString), "cuGetErrorString", 6000},
    {offsetof(Driver, DeviceGet), "cuDeviceGet", 2000},
    {offsetof(Driver, DeviceGetCount), "cuDeviceGetCount", 2000},
    {offsetof(Driver, DeviceGetAttribute), "cuDeviceGetAttribute", 2000},
    {offsetof(Driver, DeviceGetName), "cuDeviceGetName", 2000},
    {offsetof(Driver, DeviceGetUuid), "cuDeviceGetUuid", 11040},
    {offsetof(Driver, DeviceTotalMem), "cuDeviceTotalMem", 3020},
    {offsetof(Driver, DeviceCanAccessPeer), "cuDeviceCanAccessPeer", 4000},
    {offsetof(Driver, DevicePrimaryCtxRetain), "cuDevicePrimaryCtxRetain", 7000},
    {offsetof(Driver, DevicePrimaryCtxRelease), "cuDevicePrimaryCtxRelease", 11000},
    {offsetof(Driver, CtxSetCurrent), "cuCtxSetCurrent", 4000},
    {offsetof(Driver, CtxGetCurrent), "cuCtxGetCurrent", 4000},
    {offsetof(Driver, CtxEnablePeerAccess), "cuCtxEnablePeerAccess", 4000},
    {offsetof(Driver, CtxGetStreamPriorityRange), "cuCtxGetStreamPriorityRange", 5050},
    {offsetof(Driver, CtxSynchronize), "cuCtxSynchronize", 2000},
    {offsetof(Driver, StreamCreateWithPriority), "cuStreamCreateWithPriority", 5050},
    {offsetof(Driver, StreamDestroy), "cuStreamDestroy", 4000},
    {offsetof(Driver, StreamSynchronize), "cuStreamSynchronize", 2000},
    {offsetof(Driver, StreamWaitEvent), "cuStreamWaitEvent", 3020},
    {offsetof(Driver, StreamIsCapturing), "cuStreamIsCapturing", 10000},
    {offsetof(Driver, StreamBeginCapture), "cuStreamBeginCapture", 10010},
    {offsetof(Driver, StreamEndCapture), "cuStreamEndCapture", 10000},
    {offsetof(Driver, GraphInstantiate), "cuGraphInstantiateWithFlags", 11040},
    {offsetof(Driver, GraphLaunch), "cuGraphLaunch", 10000},
    {offsetof(Driver, GraphExecDestroy), "cuGraphExecDestroy", 10000},
    {offsetof(Driver, GraphDestroy), "cuGraphDestroy", 10000},
    {offsetof(Driver, EventCreate), "cuEventCreate", 2000},
    {offsetof(Driver, EventRecord), "cuEventRecord", 2000},
    {offsetof(Driver, EventQuery), "cuEventQuery", 2000},
    {offsetof(Driver, EventSynchronize), "cuEventSynchronize", 2000},
    {offsetof(Driver, EventElapsedTime), "cuEventElapsedTime", 2000},
    {offsetof(Driver, EventDestroy), "cuEventDestroy", 4000},
    {offsetof(Driver, MemAlloc), "cuMemAlloc", 3020},
    {offsetof(Driver, MemFree), "cuMemFree", 3020},
    {offsetof(Driver, MemAllocAsync), "cuMemAllocAsync", 11020},
    {offsetof(Driver, MemFreeAsync), "cuMemFreeAsync", 11020},
    {offsetof(Driver, MemHostAlloc), "cuMemHostAlloc", 2020},
    {offsetof(Driver, MemHostGetDevicePointer), "cuMemHostGetDevicePointer", 3020},
    {offsetof(Driver, MemFreeHost), "cuMemFreeHost", 2000},
    {offsetof(Driver, MemcpyAsync), "cuMemcpyAsync", 4000},
    {offsetof(Driver, MemsetD8Async), "cuMemsetD8Async", 3020},
    {offsetof(Driver, MemsetD32Async), "cuMemsetD32Async", 3020},
    {offsetof(Driver, LibraryLoadData), "cuLibraryLoadData", 12000},
    {offsetof(Driver, LibraryGetKernel), "cuLibraryGetKernel", 12000},
    {offsetof(Driver, LibraryUnload), "cuLibraryUnload", 12000},
    {offsetof(Driver, KernelGetFunction), "cuKernelGetFunction", 12000},
    {offsetof(Driver, LaunchKernelEx), "cuLaunchKernelEx", 11060},
    {offsetof(Driver, MemGetAllocationGranularity), "cuMemGetAllocationGranularity",
     10020},
    {offsetof(Driver, MemCreate), "cuMemCreate", 10020},
    {offsetof(Driver, MemRelease), "cuMemRelease", 10020},
    {offsetof(Driver, MemAddressReserve), "cuMemAddressReserve", 10020},
    {offsetof(Driver, MemAddressFree), "cuMemAddressFree", 10020},
    {offsetof(Driver, MemMap), "cuMemMap", 10020},
    {offsetof(Driver, MemUnmap), "cuMemUnmap", 10020},
    {offsetof(Driver, MemSetAccess), "cuMemSetAccess", 10020},
    {offsetof(Driver, MemExportToShareableHandle), "cuMemExportToShareableHandle",
     10020},
    {offsetof(Driver, MemImportFromShareableHandle), "cuMemImportFromShareableHandle",
     10020},
    {offsetof(Driver, IpcGetMemHandle), "cuIpcGetMemHandle", 4010},
    {offsetof(Driver, IpcOpenMemHandle), "cuIpcOpenMemHandle", 11000},
    {offsetof(Driver, IpcCloseMemHandle), "cuIpcCloseMemHandle", 4010},
    {offsetof(Driver, FuncLoad), "cuFuncLoad", 12040, true},
    {offsetof(Driver, MulticastCreate), "cuMulticastCreate", 12010, true},
    {offsetof(Driver, MulticastAddDevice), "cuMulticastAddDevice", 12010, true},
    {offsetof(Driver, MulticastBindMem), "cuMulticastBindMem", 12010, true},
    {offsetof(Driver, MulticastUnbind), "cuMulticastUnbind", 12010, true},
    {offsetof(Driver, MulticastGetGranularity), "cuMulticastGetGranularity", 12010,
     true},
};

template <typename Function>
Function As(void* symbol) {
  return reinterpret_cast<Function>(symbol);
}

// Returns "12.4" for 12040.
std::string VersionText(int version) {
  return std::to_string(version / 1000) + "." + std::to_string(version % 1000 / 10);
}

Driver OpenDriver() {
  // The library is never closed, because threads that the driver started may run until
  // the process exits.
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
