// The heaps of a process's own ranks, allocated so that they can be shared, and the
// heaps of other processes, mapped for the devices of this process.
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

// Exports memory to other processes. Returns its handle in hexadecimal digits. In mode
// kVmm, the handle is a file descriptor instead: it is appended to `passed`, and the
// result is "". Throws SystemError.
std::string ExportHandle(SharingMode mode,
                         const PhysicalMemory& memory,
                         std::vector<FileDescriptor>& passed);
// Imports memory that a peer has exported. `handle` and `passed` are the results of
// ExportHandle in the peer's process. `peer` is the name of the peer in error messages.
// Throws SystemError.
PhysicalMemory ImportHandle(const Driver& driver,
                            SharingMode mode,
                            const std::string& handle,
                            const FileDescriptor& passed,
                            const std::string& peer);

// The devices of this process's ranks, with an error record for each rank. Several
// ranks may share a device. `n` is the index of a rank among the ranks of this process.
class LocalDevices {
 public:
  // `ordinals` has the device ordinals of this process's ranks, ascending by rank.
  LocalDevices(const Driver& driver, std::vector<int> ordinals);

  const Driver& driver() const { return driver_; }
  int num_ranks() const { return static_cast<int>(ordinals_.size()); }
  int ordinal(int n) const { return ordinals_[n]; }
  int index_of(int n) const { return indices_[n]; }  // an index into contexts()
  const Context& context_of(int n) const { return contexts_[indices_[n]]; }
  const std::vector<Context>& contexts() const { return contexts_; }
  const std::vector<CUdevice>& devices() const { return devices_; }

  // Returns why a device cannot access the memory of another device, such as "GPU 0
  // cannot access GPU 1 ...". Returns "" if all devices can access each other's memory.
  std::string UnreachableReason() const;
  // Enables access from each device to memory of the other devices.
  void EnablePeerAccess() const;

  // Allocates the error record of each rank, in host memory. Must be called once,
  // before record() and record_address().
  void MakeRecords();
  ErrorRecord& record(int n) const {
    return *static_cast<ErrorRecord*>(records_[n].get());
  }
  CUdeviceptr record_address(int n) const { return records_[n].device(); }

 private:
  const Driver& driver_;
  std::vector<int> ordinals_;        // indexed by own rank
  std::vector<int> indices_;         // the index into contexts_; indexed by own rank
  std::vector<Context> contexts_;    // one for each distinct device
  std::vector<CUdevice> devices_;    // the same devices as contexts_
  std::vector<HostMemory> records_;  // indexed by own rank
};

// The heaps of this process's ranks, with all flags zero.
class LocalHeaps {
 public:
  LocalHeaps() = default;
  // Allocates the heaps by virtual memory management. They can be exported as each
  // handle type in `handle_types`, a mask of CUmemAllocationHandleType. Throws
  // SystemError if the driver refuses, and CommunicatorError if a device is out of
  // memory.
  static LocalHeaps Virtual(const LocalDevices& devices,
                            int64_t size_bytes,
                            unsigned handle_types);
  // Allocates the heaps by cuMemAlloc, for mode kIpc. Throws CommunicatorError if a
  // device is out of memory.
  static LocalHeaps Allocated(const LocalDevices& devices, int64_t size_bytes);

  explicit operator bool() const { return !bases_.empty(); }
  bool is_virtual() const { return !virtual_.empty(); }
  const VirtualMemory& virtual_memory(int n) const { return virtual_[n]; }
  CUdeviceptr base(int n) const { return bases_[n]; }
  int64_t size_bytes() const { return size_bytes_; }  // the sum over all own ranks

  // Returns the sizes and handles of the heaps, from which another process can import
  // them. Throws SystemError.
  SetupMessage Export(SharingMode mode) const;

  // Keeps memory to which a peer may still write. It is freed when the process exits.
  // Virtual memory need not be kept, because the driver keeps it while a peer has it
  // mapped.
  void FreeAtExit();

 private:
  const LocalDevices* devices_ = nullptr;
  std::vector<VirtualMemory> virtual_;
  std::vector<DeviceMemory> allocated_;
  std::vector<CUdeviceptr> bases_;  // indexed by own rank
  int64_t size_bytes_ = 0;
};

// Memory of another process that was opened by CUDA IPC in one context.
struct OpenedIpcHandle {
  CUcontext context = nullptr;
  CUdeviceptr base = 0;
  bool operator==(const OpenedIpcHandle&) const = default;
};
struct OpenedIpcHandleTraits {
  using Value = OpenedIpcHandle;
  static void Close(const Driver& driver, Value opened) noexcept;
};

// The heaps of the ranks of another process, mapped in this process.
class PeerHeaps {
 public:
  PeerHeaps() = default;
  // Imports the heaps of a peer. `message` is the result of LocalHeaps::Export in the
  // peer's process, which must have `num_ranks` heaps of at least `size_bytes` each.
  // `peer` is the name of the peer in error messages. Throws SystemError.
  PeerHeaps(const LocalDevices& devices,
            SharingMode mode,
            const SetupMessage& message,
            int num_ranks,
            int64_t size_bytes,
            const std::string& peer);

  // Returns the address of the heap of the other process's n-th rank. The address is
  // valid on the device of LocalDevices::contexts()[device_index], and may differ
  // between devices.
  CUdeviceptr base(int device_index, int n) const {
    return bases_[bases_.size() == 1 ? 0 : device_index][n];
  }

 private:
  void ImportVirtual(const LocalDevices& devices,
                     SharingMode mode,
                     const SetupMessage& message);
  void OpenIpc(const LocalDevices& devices);

  struct Exported {
    int64_t size_bytes = 0;
    std::string handle;  // hexadecimal; empty in mode kVmm
  };
  std::vector<Exported> Parse(const SetupMessage& message, int num_ranks) const;

  std::string peer_;
  std::vector<Exported> exported_;
  std::vector<VirtualMemory> virtual_;
  std::vector<DriverHandle<OpenedIpcHandleTraits>> opened_;
  // Addresses of the heaps: bases_[device of this process][rank of the other process].
  // If all devices have the same addresses, there is only one row.
  std::vector<std::vector<CUdeviceptr>> bases_;
};

}  // namespace jax_ub
