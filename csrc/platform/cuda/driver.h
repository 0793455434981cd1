// The CUDA driver as a table of functions: nothing links to it, and tests put an
// emulation in its place. A member is named as its function, without "cu".
#pragma once

#include <cuda.h>

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

  // Of CUDA 12.4: null in an older driver, which loads a kernel when it is first launched.
  decltype(&cuFuncLoad) FuncLoad;

  // Of CUDA 12.1: all null in an older driver, which has no multicast.
  decltype(&cuMulticastCreate) MulticastCreate;
  decltype(&cuMulticastAddDevice) MulticastAddDevice;
  decltype(&cuMulticastBindMem) MulticastBindMem;
  decltype(&cuMulticastUnbind) MulticastUnbind;
  decltype(&cuMulticastGetGranularity) MulticastGetGranularity;
};

// The driver of libcuda.so.1, initialized. Throws UnsupportedError when there is none,
// when it is older than CUDA 12.0 or sees no device: its text says which, and the version.
const Driver& SystemDriver();

// The same out of what finds a symbol; null where there is none. For tests.
Driver LoadDriver(void* (*find_symbol)(const char* name));

// "CUDA_ERROR_INVALID_VALUE: invalid argument".
std::string DescribeResult(const Driver& driver, CUresult result);

// Throws SystemError "cuMemCreate: CUDA_ERROR_...: text" unless it succeeded.
void Check(const Driver& driver, CUresult result, const char* what);

}  // namespace jax_ub
