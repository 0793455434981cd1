// The memory of heaps: of the own ranks, in whatever way it is to be shared, and of the
// others as this process's devices reach it.
#pragma once

#include <cuda.h>

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "platform/cuda/driver.h"
#include "platform/cuda/owners.h"
#include "transport/cuda/capabilities.h"
#include "transport/cuda/heap.h"
#include "transport/cuda/virtual_memory.h"
#include "transport/process/setup_exchange.h"

namespace jax_ub {

// The handle of memory for other processes: as text, or (vmm) as one more descriptor.
// Throws SystemError.
std::string ExportHandle(SharingMode mode,
                         const PhysicalMemory& memory,
                         std::vector<FileDescriptor>& passed);
// Of what `peer` exported: the text and the descriptor. Throws SystemError.
PhysicalMemory ImportHandle(const Driver& driver,
                            SharingMode mode,
                            const std::string& handle,
                            const FileDescriptor& passed,
                            const std::string& peer);

// The devices of a process's own ranks, and where these say that they failed. Several ranks may have one.
class LocalDevices {
 public:
  // `ordinals`: of the own ranks.
  LocalDevices(const Driver& driver, std::vector<int> ordinals);

  const Driver& driver() const { return driver_; }
  int num_ranks() const { return static_cast<int>(ordinals_.size()); }
  int ordinal(int n) const { return ordinals_[n]; }
  int index_of(int n) const { return indices_[n]; }  // into contexts()
  const Context& context_of(int n) const { return contexts_[indices_[n]]; }
  const std::vector<Context>& contexts() const { return contexts_; }
  const std::vector<CUdevice>& devices() const { return devices_; }

  // Which of them cannot access another one: "GPU 0 cannot access GPU 1 ..."; or "".
  std::string WhyApart() const;
  // Lets each of them reach what the others allocate.
  void EnablePeerAccess() const;

  // Once, before the two below.
  void MakeRecords();
  ErrorRecord& record(int n) const {
    return *static_cast<ErrorRecord*>(records_[n].get());
  }
  CUdeviceptr record_address(int n) const { return records_[n].device(); }

 private:
  const Driver& driver_;
  std::vector<int> ordinals_;      // [own rank]
  std::vector<int> indices_;       // [own rank]
  std::vector<Context> contexts_;  // one for each device
  std::vector<CUdevice> devices_;
  std::vector<HostMemory> records_;  // [own rank]
};

// The heaps of the own ranks, with their flags zero.
class LocalHeaps {
 public:
  LocalHeaps() = default;
  // By virtual memory management: throws SystemError where that is refused. Both throw
  // CommunicatorError when a device has no room.
  static LocalHeaps Virtual(const LocalDevices& devices,
                            int64_t size_bytes,
                            unsigned handle_types);
  static LocalHeaps Allocated(const LocalDevices& devices, int64_t size_bytes);

  explicit operator bool() const { return !bases_.empty(); }
  bool is_virtual() const { return !virtual_.empty(); }
  const VirtualMemory& virtual_memory(int n) const { return virtual_[n]; }
  CUdeviceptr base(int n) const { return bases_[n]; }
  int64_t size_bytes() const { return size_bytes_; }  // of all of them

  // What another process needs to import them. Throws SystemError.
  SetupMessage Export(SharingMode mode) const;

  // Leaves the memory to the end of the process: a peer may still write to it.
  void FreeAtExit();

 private:
  const LocalDevices* devices_ = nullptr;
  std::vector<VirtualMemory> virtual_;
  std::vector<DeviceMemory> allocated_;
  std::vector<CUdeviceptr> bases_;  // [own rank]
  int64_t size_bytes_ = 0;
};

// An opened cuIpc handle: of one context.
struct OpenedIpcHandle {
  CUcontext context = nullptr;
  CUdeviceptr base = 0;
  bool operator==(const OpenedIpcHandle&) const = default;
};
struct OpenedIpcHandleTraits {
  using Value = OpenedIpcHandle;
  static void Close(const Driver& driver, Value opened) noexcept;
};

// The heaps of another process's ranks.
class PeerHeaps {
 public:
  PeerHeaps() = default;
  // `note` is what LocalHeaps::Export returned there, of `num_ranks` ranks whose heaps are
  // at least of `size_bytes`. Throws SystemError, which names the `peer` where that passed
  // something else.
  PeerHeaps(const LocalDevices& devices,
            SharingMode mode,
            const SetupMessage& note,
            int num_ranks,
            int64_t size_bytes,
            const std::string& peer);

  // Of the process's n-th rank, for an own device.
  CUdeviceptr base(int device_index, int n) const {
    return bases_[bases_.size() == 1 ? 0 : device_index][n];
  }

 private:
  void ImportVirtual(const LocalDevices& devices,
                     SharingMode mode,
                     const SetupMessage& note);
  void OpenIpc(const LocalDevices& devices);

  struct Exported {
    int64_t size_bytes = 0;
    std::string handle;  // in hexadecimal
  };
  std::vector<Exported> Parse(const SetupMessage& note, int num_ranks) const;

  std::string peer_;
  std::vector<Exported> exported_;
  std::vector<VirtualMemory> virtual_;
  std::vector<DriverHandle<OpenedIpcHandleTraits>> opened_;
  // [own device][rank of the process]; one for all devices where addresses are the same.
  std::vector<std::vector<CUdeviceptr>> bases_;
};

}  // namespace jax_ub
