// What the CUDA driver lends, owned from the line that gets it. Owners can be moved, not
// copied; destructors never throw: a driver that is shutting down refuses, and that is all.
// The Driver outlives them. An owner is destroyed on any thread, in any current context.
#pragma once

#include <cstddef>
#include <cstdint>
#include <utility>

#include "platform/cuda/driver.h"

namespace jax_ub {

// What any owner holds: the driver, and a value that is zero when there is nothing to close.
// `Traits` has Value and a static Close(const Driver&, Value) noexcept.
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

// Makes a context current on this thread, and what was current before at the end.
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

// A device's primary context, the one that XLA works in, retained.
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

// The owners below are made in the context that is current.

struct StreamTraits {
  using Value = CUstream;
  static void Close(const Driver& driver, CUstream stream) noexcept;
};
class Stream : public DriverHandle<StreamTraits> {
 public:
  Stream() = default;
  // Not ordered with the default stream. The lower the priority's number the more urgent,
  // as CtxGetStreamPriorityRange has them.
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

// Memory is given back in the context that it was allocated in: the driver refuses where
// none is current.
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

// Memory for what a stream does while this lives, given back behind that. Nothing waits
// for it, where cuMemAlloc and cuMemFree may wait for all that a device has to do, and for
// the devices that have access to it.
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

// Host memory that devices read and write, at device() there. It holds zeros.
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
  // `image`: a fatbin, as `jax_ub_kernels` of csrc/CMakeLists.txt embeds it.
  Library(const Driver& driver, const unsigned char* image);

  // The kernel in the current context, loaded: its first launch allocates nothing, so it
  // may be captured. Throws SystemError if the image has none of that name.
  CUfunction Function(const char* name) const;
};

}  // namespace jax_ub
