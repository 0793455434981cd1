// The CUDA driver as a table of function pointers, so that no library links to libcuda
// and tests can substitute an emulation. Each member has its function's name without
// "cu".
#pragma once

#include <cuda.h>

#include <cstddef>
#include <string>

namespace jax_ub {

struct Driver {
  decltype(&cuInit) Init;
  decltype(&cuDriverGetVersion) DriverGetVersion;
  decltype(&cuGetErrorName) GetErrorName;
  decltype(&cuGetErrorString) GetErrorString;

  decltype(&cuDeviceGet) DeviceGet;
  decltype(&cuDeviceGetCount) DeviceGetCount;
  decltype(&cuDeviceGetAttribute) DeviceGetAttribute;
  decltype(&cuDeviceGetName) DeviceGetName;
  decltype(&cuDeviceGetUuid) DeviceGetUuid;
  decltype(&cuDeviceTotalMem) DeviceTotalMem;
  decltype(&cuDeviceCanAccessPeer) DeviceCanAccessPeer;
  decltype(&cuDevicePrimaryCtxRetain) DevicePrimaryCtxRetain;
  decltype(&cuDevicePrimaryCtxRelease) DevicePrimaryCtxRelease;
  decltype(&cuCtxSetCurrent) CtxSetCurrent;
  decltype(&cuCtxGetCurrent) CtxGetCurrent;
  decltype(&cuCtxEnablePeerAccess) CtxEnablePeerAccess;
  decltype(&cuCtxGetStreamPriorityRange) CtxGetStreamPriorityRange;
  decltype(&cuCtxSynchronize) CtxSynchronize;

  decltype(&cuStreamCreateWithPriority) StreamCreateWithPriority;
  decltype(&cuStreamDestroy) StreamDestroy;
  decltype(&cuStreamSynchronize) StreamSynchronize;
  decltype(&cuStreamWaitEvent) StreamWaitEvent;
  decltype(&cuStreamIsCapturing) StreamIsCapturing;
  decltype(&cuStreamBeginCapture) StreamBeginCapture;
  decltype(&cuStreamEndCapture) StreamEndCapture;
  decltype(&cuGraphInstantiateWithFlags) GraphInstantiate;
  decltype(&cuGraphLaunch) GraphLaunch;
  decltype(&cuGraphExecDestroy) GraphExecDestroy;
  decltype(&cuGraphDestroy) GraphDestroy;
  decltype(&cuEventCreate) EventCreate;
  decltype(&cuEventRecord) EventRecord;
  decltype(&cuEventQuery) EventQuery;
  decltype(&cuEventSynchronize) EventSynchronize;
  decltype(&cuEventElapsedTime) EventElapsedTime;
  decltype(&cuEventDestroy) EventDestroy;

  decltype(&cuMemAlloc) MemAlloc;
  decltype(&cuMemFree) MemFree;
  decltype(&cuMemAllocAsync) MemAllocAsync;
  decltype(&cuMemFreeAsync) MemFreeAsync;
  decltype(&cuMemHostAlloc) MemHostAlloc;
  decltype(&cuMemHostGetDevicePointer) MemHostGetDevicePointer;
  decltype(&cuMemFreeHost) MemFreeHost;
  decltype(&cuMemcpyAsync) MemcpyAsync;
  decltype(&cuMemsetD8Async) MemsetD8Async;
  decltype(&cuMemsetD32Async) MemsetD32Async;

  decltype(&cuLibraryLoadData) LibraryLoadData;
  decltype(&cuLibraryGetKernel) LibraryGetKernel;
  decltype(&cuLibraryUnload) LibraryUnload;
  decltype(&cuKernelGetFunction) KernelGetFunction;
  decltype(&cuLaunchKernelEx) LaunchKernelEx;

  decltype(&cuMemGetAllocationGranularity) MemGetAllocationGranularity;
  decltype(&cuMemCreate) MemCreate;
  decltype(&cuMemRelease) MemRelease;
  decltype(&cuMemAddressReserve) MemAddressReserve;
  decltype(&cuMemAddressFree) MemAddressFree;
  decltype(&cuMemMap) MemMap;
  decltype(&cuMemUnmap) MemUnmap;
  decltype(&cuMemSetAccess) MemSetAccess;
  decltype(&cuMemExportToShareableHandle) MemExportToShareableHandle;
  decltype(&cuMemImportFromShareableHandle) MemImportFromShareableHandle;
  decltype(&cuIpcGetMemHandle) IpcGetMemHandle;
  decltype(&cuIpcOpenMemHandle) IpcOpenMemHandle;
  decltype(&cuIpcCloseMemHandle) IpcCloseMemHandle;

  // Since CUDA 12.4. Null in older drivers, which load a kernel at its first launch.
  decltype(&cuFuncLoad) FuncLoad;

  // Since CUDA 12.1. Null in older drivers, which do not support multicast.
  decltype(&cuMulticastCreate) MulticastCreate;
  decltype(&cuMulticastAddDevice) MulticastAddDevice;
  decltype(&cuMulticastBindMem) MulticastBindMem;
  decltype(&cuMulticastUnbind) MulticastUnbind;
  decltype(&cuMulticastGetGranularity) MulticastGetGranularity;
};

// Returns the functions of libcuda.so.1, after cuInit. Throws UnsupportedError, with
// the reason and the driver's version, if the library is missing, is older than CUDA
// 12.0, or finds no device.
const Driver& SystemDriver();

// Looks up the driver functions with `find_symbol`, which returns null for unknown
// names. Tests pass the symbols of an emulated driver.
Driver LoadDriver(void* (*find_symbol)(const char* name));

// Returns a pointer to device memory as the driver's type.
inline CUdeviceptr AddressOf(const std::byte* data) {
  return reinterpret_cast<CUdeviceptr>(data);
}

// Returns name and text of a driver error, such as "CUDA_ERROR_INVALID_VALUE: invalid
// argument".
std::string DescribeResult(const Driver& driver, CUresult result);

// Throws SystemError unless `result` is CUDA_SUCCESS. `what` is the function that
// returned it. The message is "cuMemCreate: CUDA_ERROR_...: text".
void Check(const Driver& driver, CUresult result, const char* what);

}  // namespace jax_ub
