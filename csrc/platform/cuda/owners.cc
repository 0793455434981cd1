#include "platform/cuda/owners.h"

#include <cstring>

namespace jax_ub {

namespace {

CUcontext CurrentContext(const Driver& driver) {
  CUcontext current = nullptr;
  Check(driver, driver.CtxGetCurrent(&current), "cuCtxGetCurrent");
  return current;
}

// Calls `close` while `context` is current. Ignores errors, because the driver may be
// shutting down.
template <typename Function>
void CloseIn(const Driver& driver, CUcontext context, const Function& close) noexcept {
  CUcontext before = nullptr;
  driver.CtxGetCurrent(&before);
  driver.CtxSetCurrent(context);
  close();
  driver.CtxSetCurrent(before);
}

}  // namespace

ScopedContext::ScopedContext(const Driver& driver, CUcontext context)
    : driver_(driver) {
  Check(driver, driver.CtxGetCurrent(&before_), "cuCtxGetCurrent");
  Check(driver, driver.CtxSetCurrent(context), "cuCtxSetCurrent");
}

ScopedContext::~ScopedContext() { driver_.CtxSetCurrent(before_); }

void PrimaryContextTraits::Close(const Driver& driver, Value retained) noexcept {
  driver.DevicePrimaryCtxRelease(retained.device);
}

Context::Context(const Driver& driver, int ordinal) {
  RetainedDevice retained;
  Check(driver, driver.DeviceGet(&retained.device, ordinal), "cuDeviceGet");
  Check(driver, driver.DevicePrimaryCtxRetain(&retained.context, retained.device),
        "cuDevicePrimaryCtxRetain");
  handle_ = {driver, retained};
}

int Context::Attribute(CUdevice_attribute attribute) const {
  int value = 0;
  const CUresult result = driver().DeviceGetAttribute(&value, attribute, device());
  // A driver that does not know the attribute does not have the feature, either.
  if (result == CUDA_ERROR_INVALID_VALUE) return 0;
  Check(driver(), result, "cuDeviceGetAttribute");
  return value;
}

void StreamTraits::Close(const Driver& driver, CUstream stream) noexcept {
  driver.StreamDestroy(stream);
}

Stream::Stream(const Driver& driver, int priority) {
  CUstream stream = nullptr;
  Check(driver,
        driver.StreamCreateWithPriority(&stream, CU_STREAM_NON_BLOCKING, priority),
        "cuStreamCreateWithPriority");
  DriverHandle::operator=({driver, stream});
}

void EventTraits::Close(const Driver& driver, CUevent event) noexcept {
  driver.EventDestroy(event);
}

Event::Event(const Driver& driver, unsigned flags) {
  CUevent event = nullptr;
  Check(driver, driver.EventCreate(&event, flags), "cuEventCreate");
  DriverHandle::operator=({driver, event});
}

void DeviceMemoryTraits::Close(const Driver& driver, Value memory) noexcept {
  CloseIn(driver, memory.context, [&] { driver.MemFree(memory.address); });
}

DeviceMemory::DeviceMemory(const Driver& driver, int64_t size_bytes)
    : size_bytes_(size_bytes) {
  CUdeviceptr memory = 0;
  const CUcontext context = CurrentContext(driver);
  Check(driver, driver.MemAlloc(&memory, static_cast<size_t>(size_bytes)),
        "cuMemAlloc");
  DriverHandle::operator=({driver, {memory, context}});
}

void StreamMemoryTraits::Close(const Driver& driver, Value memory) noexcept {
  driver.MemFreeAsync(memory.address, memory.stream);
}

StreamMemory::StreamMemory(const Driver& driver, int64_t size_bytes, CUstream stream) {
  CUdeviceptr memory = 0;
  Check(driver, driver.MemAllocAsync(&memory, static_cast<size_t>(size_bytes), stream),
        "cuMemAllocAsync");
  DriverHandle::operator=({driver, {memory, stream}});
}

void HostMemoryTraits::Close(const Driver& driver, Value memory) noexcept {
  CloseIn(driver, memory.context, [&] { driver.MemFreeHost(memory.address); });
}

HostMemory::HostMemory(const Driver& driver, int64_t size_bytes) {
  void* memory = nullptr;
  const auto size = static_cast<size_t>(size_bytes);
  constexpr unsigned kFlags = CU_MEMHOSTALLOC_DEVICEMAP | CU_MEMHOSTALLOC_PORTABLE;
  const CUcontext context = CurrentContext(driver);
  Check(driver, driver.MemHostAlloc(&memory, size, kFlags), "cuMemHostAlloc");
  DriverHandle::operator=({driver, {memory, context}});
  std::memset(memory, 0, size);
  Check(driver, driver.MemHostGetDevicePointer(&device_, memory, 0),
        "cuMemHostGetDevicePointer");
}

void LibraryTraits::Close(const Driver& driver, CUlibrary library) noexcept {
  driver.LibraryUnload(library);
}

Library::Library(const Driver& driver, const unsigned char* image) {
  CUlibrary library = nullptr;
  Check(
      driver,
      driver.LibraryLoadData(&library, image, nullptr, nullptr, 0, nullptr, nullptr, 0),
      "cuLibraryLoadData");
  DriverHandle::operator=({driver, library});
}

CUfunction Library::Function(const char* name) const {
  CUkernel kernel = nullptr;
  CUfunction function = nullptr;
  Check(driver(), driver().LibraryGetKernel(&kernel, get(), name),
        (std::string("cuLibraryGetKernel of ") + name).c_str());
  Check(driver(), driver().KernelGetFunction(&function, kernel), "cuKernelGetFunction");
  if (driver().FuncLoad != nullptr) {
    Check(driver(), driver().FuncLoad(function), "cuFuncLoad");
  }
  return function;
}

}  // namespace jax_ub
