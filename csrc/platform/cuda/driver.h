// The CUDA driver as a table of function pointers, so that jax_ub does not link to
// libcuda and tests can substitute an emulation. Each member has the name of its
// function without the prefix "cu".
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

  // Loads a kernel before its first launch. Null in drivers before CUDA 12.4, which
  // load a kernel when it is first launched.
  decltype(&cuFuncLoad) FuncLoad;

  // The functions for multicast memory. Null in drivers before CUDA 12.1, which do not
  // support multicast.
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

// Returns the name and the description of a driver error, such as
// "CUDA_ERROR_INVALID_VALUE: invalid argument".
std::string DescribeResult(const Driver& driver, CUresult result);

// Throws SystemError unless `result` is CUDA_SUCCESS. `what` is the function that
// returned it. The message is "cuMemCreate: CUDA_ERROR_...: text".
void Check(const Driver& driver, CUresult result, const char* what);

}  // namespace jax_ub
