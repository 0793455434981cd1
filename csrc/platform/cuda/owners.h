// Move-only owners of CUDA driver resources. Destructors never throw: they ignore
// errors, because a driver that is shutting down rejects every call. The Driver must
// outlive the owners. An owner may be destroyed on any thread, with any context
// current.
#pragma once

#include <cstddef>
#include <cstdint>
#include <utility>

#include "platform/cuda/driver.h"

namespace jax_ub {

// Owns an object of the CUDA driver, such as a stream, and closes it when destroyed.
// `Traits` defines the type `Value` of the driver's handle (zero: no object) and a
// function `static void Close(const Driver&, Value) noexcept`.
template <typename Traits>
class DriverHandle {
 public:
  using Value = typename Traits::Value;

  DriverHandle() = default;
  DriverHandle(const Driver& driver, Value value) : driver_(&driver), value_(value) {}
  ~DriverHandle() { reset(); }
  DriverHandle(DriverHandle&& other) noexcept
      : driver_(other.driver_), value_(std::exchange(other.value_, Value{})) {}
  DriverHandle& operator=(DriverHandle&& other) noexcept {
    if (this != &other) {
      reset();
      driver_ = other.driver_;
      value_ = std::exchange(other.value_, Value{});
    }
    return *this;
  }

  const Value& get() const { return value_; }
  explicit operator bool() const { return value_ != Value{}; }
  const Driver& driver() const { return *driver_; }
  void reset() noexcept {
    if (*this) Traits::Close(*driver_, std::exchange(value_, Value{}));
  }

 private:
  const Driver* driver_ = nullptr;
  Value value_{};
};

// Makes a context current on the calling thread, and restores the previous one at the
// end of the scope.
class ScopedContext {
 public:
  ScopedContext(const Driver& driver, CUcontext context);
  ~ScopedContext();
  ScopedContext(const ScopedContext&) = delete;
  ScopedContext& operator=(const ScopedContext&) = delete;

 private:
  const Driver& driver_;
  CUcontext before_ = nullptr;
};

// A device and its primary context. XLA uses the same context.
struct RetainedDevice {
  CUdevice device = 0;
  CUcontext context = nullptr;
  bool operator==(const RetainedDevice&) const = default;
};
struct PrimaryContextTraits {
  using Value = RetainedDevice;
  static void Close(const Driver& driver, Value retained) noexcept;
};
class Context {
 public:
  Context() = default;
  Context(const Driver& driver, int ordinal);

  const Driver& driver() const { return handle_.driver(); }
  CUcontext get() const { return handle_.get().context; }
  CUdevice device() const { return handle_.get().device; }
  explicit operator bool() const { return static_cast<bool>(handle_); }
  int Attribute(CUdevice_attribute attribute) const;

 private:
  DriverHandle<PrimaryContextTraits> handle_;
};

// The classes below create their resources in the CUDA context that is current on the
// calling thread.

struct StreamTraits {
  using Value = CUstream;
  static void Close(const Driver& driver, CUstream stream) noexcept;
};
class Stream : public DriverHandle<StreamTraits> {
 public:
  Stream() = default;
  // Creates a stream that does not synchronize with the default stream. Lower numbers
  // are higher priorities, as in cuCtxGetStreamPriorityRange.
  explicit Stream(const Driver& driver, int priority = 0);
};

struct EventTraits {
  using Value = CUevent;
  static void Close(const Driver& driver, CUevent event) noexcept;
};
class Event : public DriverHandle<EventTraits> {
 public:
  Event() = default;
  explicit Event(const Driver& driver, unsigned flags = CU_EVENT_DISABLE_TIMING);
};

// An address of memory and the context of its allocation. To free the memory, the owner
// makes this context current, as the driver requires.
template <typename Address>
struct InContext {
  Address address{};
  CUcontext context = nullptr;
  bool operator==(const InContext&) const = default;
};

struct DeviceMemoryTraits {
  using Value = InContext<CUdeviceptr>;
  static void Close(const Driver& driver, Value memory) noexcept;
};
class DeviceMemory : public DriverHandle<DeviceMemoryTraits> {
 public:
  DeviceMemory() = default;
  DeviceMemory(const Driver& driver, int64_t size_bytes);
  CUdeviceptr get() const { return DriverHandle::get().address; }
  int64_t size_bytes() const { return *this ? size_bytes_ : 0; }

 private:
  int64_t size_bytes_ = 0;
};

// Memory for work that is enqueued on a stream while the owner exists. The memory is
// freed after this work. Unlike cuMemAlloc and cuMemFree, allocating and freeing do not
// wait for other work of the device or of its peers.
struct InStream {
  CUdeviceptr address = 0;
  CUstream stream = nullptr;
  bool operator==(const InStream&) const = default;
};
struct StreamMemoryTraits {
  using Value = InStream;
  static void Close(const Driver& driver, Value memory) noexcept;
};
class StreamMemory : public DriverHandle<StreamMemoryTraits> {
 public:
  StreamMemory(const Driver& driver, int64_t size_bytes, CUstream stream);
  CUdeviceptr get() const { return DriverHandle::get().address; }
};

// Pinned host memory, initially zero. Devices access it at HostMemory::device().
struct HostMemoryTraits {
  using Value = InContext<void*>;
  static void Close(const Driver& driver, Value memory) noexcept;
};
class HostMemory : public DriverHandle<HostMemoryTraits> {
 public:
  HostMemory() = default;
  HostMemory(const Driver& driver, int64_t size_bytes);
  void* get() const { return DriverHandle::get().address; }
  CUdeviceptr device() const { return device_; }

 private:
  CUdeviceptr device_ = 0;
};

struct LibraryTraits {
  using Value = CUlibrary;
  static void Close(const Driver& driver, CUlibrary library) noexcept;
};
class Library : public DriverHandle<LibraryTraits> {
 public:
  Library() = default;
  // `image` is a fatbin that the CMake function jax_ub_kernels (csrc/cuda.cmake) has
  // embedded.
  Library(const Driver& driver, const unsigned char* image);

  // Returns a kernel for the current context. Loads it now, so that its first launch
  // allocates nothing and can be captured in a graph. Throws SystemError if the image
  // has no such kernel.
  CUfunction Function(const char* name) const;
};

}  // namespace jax_ub
