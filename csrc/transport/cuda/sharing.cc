#include "transport/cuda/sharing.h"

#include <algorithm>
#include <charconv>
#include <sstream>
#include <utility>

#include "platform/error.h"

namespace jax_ub {

namespace {

constexpr CUmemAllocationHandleType kFd = CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;
constexpr CUmemAllocationHandleType kFabric = CU_MEM_HANDLE_TYPE_FABRIC;

// Decodes a driver handle, which is an opaque struct, from hexadecimal digits.
template <typename Handle>
Handle HandleOf(const std::string& hex, const std::string& peer) {
  Handle handle;
  if (!ReadHex(hex, &handle, sizeof(handle))) {
    throw SystemError(peer + " passed '" + hex +
                      "' as a handle, which is not that of " +
                      std::to_string(sizeof(handle)) + " bytes");
  }
  return handle;
}

// Sets all flags of the heap at `base` to zero. Uses and synchronizes a separate
// stream. Other streams may have kernels that wait for this process, so synchronizing
// them would block.
void ZeroFlags(const Context& context, CUdeviceptr base) {
  const Driver& driver = context.driver();
  const ScopedContext scoped(driver, context.get());
  const Stream stream(driver);
  Check(driver,
        driver.MemsetD8Async(base, 0, static_cast<size_t>(HeapLayout::flags_bytes()),
                             stream.get()),
        "cuMemsetD8Async");
  Check(driver, driver.StreamSynchronize(stream.get()), "cuStreamSynchronize");
}

}  // namespace

std::string ExportHandle(SharingMode mode,
                         const PhysicalMemory& memory,
                         std::vector<FileDescriptor>& passed) {
  if (mode == SharingMode::kVmm) {
    int descriptor = -1;
    ExportMemory(memory, kFd, &descriptor);
    passed.emplace_back(descriptor);
    return "";
  }
  CUmemFabricHandle fabric = {};
  ExportMemory(memory, kFabric, &fabric);
  return HexOf(&fabric, sizeof(fabric));
}

PhysicalMemory ImportHandle(const Driver& driver,
                            SharingMode mode,
                            const std::string& handle,
                            const FileDescriptor& passed,
                            const std::string& peer) {
  if (mode == SharingMode::kVmm) {
    // The driver expects the number of the file descriptor, cast to a pointer.
    return ImportMemory(driver, kFd,
                        reinterpret_cast<void*>(static_cast<intptr_t>(passed.get())));
  }
  auto fabric = HandleOf<CUmemFabricHandle>(handle, peer);
  return ImportMemory(driver, kFabric, &fabric);
}

LocalDevices::LocalDevices(const Driver& driver, std::vector<int> ordinals)
    : driver_(driver), ordinals_(std::move(ordinals)) {
  std::vector<int> distinct;
  for (const int ordinal : ordinals_) {
    const auto found = std::find(distinct.begin(), distinct.end(), ordinal);
    indices_.push_back(static_cast<int>(found - distinct.begin()));
    if (found != distinct.end()) continue;
    distinct.push_back(ordinal);
    contexts_.emplace_back(driver, ordinal);
    devices_.push_back(contexts_.back().device());
  }
}

std::string LocalDevices::UnreachableReason() const {
  for (const CUdevice device : devices_) {
    for (const CUdevice peer : devices_) {
      if (device == peer) continue;
      int can = 0;
      Check(driver_, driver_.DeviceCanAccessPeer(&can, device, peer),
            "cuDeviceCanAccessPeer");
      if (can != 0) continue;
      return "GPU " + std::to_string(device) + " cannot access GPU " +
             std::to_string(peer) +
             " (cuDeviceCanAccessPeer): there is no NVLink or PCIe peer-to-peer "
             "between them";
    }
  }
  return "";
}

void LocalDevices::EnablePeerAccess() const {
  for (const Context& context : contexts_) {
    const ScopedContext scoped(driver_, context.get());
    for (const Context& peer : contexts_) {
      if (&peer == &context) continue;
      const CUresult result = driver_.CtxEnablePeerAccess(peer.get(), 0);
      if (result == CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED) continue;
      Check(driver_, result, "cuCtxEnablePeerAccess");
    }
  }
}

void LocalDevices::MakeRecords() {
  for (int n = 0; n < num_ranks(); ++n) {
    const ScopedContext scoped(driver_, context_of(n).get());
    records_.emplace_back(driver_, sizeof(ErrorRecord));
  }
}

LocalHeaps LocalHeaps::Virtual(const LocalDevices& devices,
                               int64_t size_bytes,
                               unsigned handle_types) {
  LocalHeaps heaps;
  heaps.devices_ = &devices;
  for (int n = 0; n < devices.num_ranks(); ++n) {
    const Context& context = devices.context_of(n);
    heaps.virtual_.push_back(VirtualMemory::Create(devices.driver(), context.device(),
                                                   size_bytes, handle_types,
                                                   devices.devices()));
    heaps.bases_.push_back(heaps.virtual_.back().base());
    heaps.size_bytes_ += heaps.virtual_.back().size_bytes();
    ZeroFlags(context, heaps.bases_.back());
  }
  return heaps;
}

LocalHeaps LocalHeaps::Allocated(const LocalDevices& devices, int64_t size_bytes) {
  // The size is rounded up to blocks of 2 MiB. An IPC handle exports a whole block, so
  // no other allocation may be in the block.
  constexpr int64_t kBlock = int64_t{2} << 20;
  const int64_t size = (size_bytes + kBlock - 1) / kBlock * kBlock;
  LocalHeaps heaps;
  heaps.devices_ = &devices;
  devices.EnablePeerAccess();
  for (int n = 0; n < devices.num_ranks(); ++n) {
    const Context& context = devices.context_of(n);
    const ScopedContext scoped(devices.driver(), context.get());
    try {
      heaps.allocated_.emplace_back(devices.driver(), size);
    } catch (const SystemError& error) {
      throw NoRoom(size, error.what());
    }
    heaps.bases_.push_back(heaps.allocated_.back().get());
    heaps.size_bytes_ += size;
    ZeroFlags(context, heaps.bases_.back());
  }
  return heaps;
}

// Returns a message with the text "size:handle,size:handle,...", with one item per heap
// in rank order. In mode kVmm, the handles are empty, and the message has file
// descriptors instead.
SetupMessage LocalHeaps::Export(SharingMode mode) const {
  SetupMessage message;
  for (int n = 0; n < devices_->num_ranks(); ++n) {
    std::string handle;
    int64_t size = 0;
    if (mode == SharingMode::kIpc) {
      size = allocated_[n].size_bytes();
      CUipcMemHandle ipc = {};
      const Driver& driver = devices_->driver();
      const ScopedContext scoped(driver, devices_->context_of(n).get());
      Check(driver, driver.IpcGetMemHandle(&ipc, bases_[n]), "cuIpcGetMemHandle");
      handle = HexOf(&ipc, sizeof(ipc));
    } else {
      size = virtual_[n].size_bytes();
      handle = ExportHandle(mode, virtual_[n].memory(), message.passed);
    }
    AppendItem(message.text, std::to_string(size).append(":").append(handle));
  }
  return message;
}

void LocalHeaps::FreeAtExit() {
  for (DeviceMemory& memory : allocated_) {
    static_cast<void>(new DeviceMemory(std::move(memory)));
  }
}

void OpenedIpcHandleTraits::Close(const Driver& driver, Value opened) noexcept {
  CUcontext before = nullptr;
  driver.CtxGetCurrent(&before);
  driver.CtxSetCurrent(opened.context);
  driver.IpcCloseMemHandle(opened.base);
  driver.CtxSetCurrent(before);
}

PeerHeaps::PeerHeaps(const LocalDevices& devices,
                     SharingMode mode,
                     const SetupMessage& message,
                     int num_ranks,
                     int64_t size_bytes,
                     const std::string& peer)
    : peer_(peer), exported_(Parse(message, num_ranks)) {
  for (const Exported& exported : exported_) {
    if (exported.size_bytes < size_bytes) {
      throw SystemError(peer + " passed a heap of " +
                        std::to_string(exported.size_bytes) + " bytes, not " +
                        std::to_string(size_bytes));
    }
  }
  if (mode == SharingMode::kIpc) {
    OpenIpc(devices);
  } else {
    ImportVirtual(devices, mode, message);
  }
}

std::vector<PeerHeaps::Exported> PeerHeaps::Parse(const SetupMessage& message,
                                                  int num_ranks) const {
  std::vector<Exported> all;
  std::istringstream stream(message.text);
  for (std::string part; std::getline(stream, part, ',');) {
    Exported exported;
    const char* const end = part.data() + part.size();
    const char* const read = std::from_chars(part.data(), end, exported.size_bytes).ptr;
    if (read == end || *read != ':') {
      throw SystemError(peer_ + " passed '" + part +
                        "' as a heap, which is no size, colon and handle");
    }
    exported.handle.assign(read + 1, end);
    all.push_back(std::move(exported));
  }
  if (static_cast<int>(all.size()) != num_ranks) {
    throw SystemError(peer_ + " passed " + std::to_string(all.size()) + " heaps, not " +
                      std::to_string(num_ranks));
  }
  return all;
}

void PeerHeaps::ImportVirtual(const LocalDevices& devices,
                              SharingMode mode,
                              const SetupMessage& message) {
  if (mode == SharingMode::kVmm && message.passed.size() != exported_.size()) {
    throw SystemError(peer_ + " passed " + std::to_string(message.passed.size()) +
                      " descriptors, not " + std::to_string(exported_.size()));
  }
  bases_.emplace_back();
  for (size_t n = 0; n < exported_.size(); ++n) {
    const FileDescriptor none;
    virtual_.emplace_back(
        ImportHandle(devices.driver(), mode, exported_[n].handle,
                     mode == SharingMode::kVmm ? message.passed[n] : none, peer_),
        static_cast<size_t>(exported_[n].size_bytes), devices.devices());
    bases_.back().push_back(virtual_.back().base());
  }
}

void PeerHeaps::OpenIpc(const LocalDevices& devices) {
  const Driver& driver = devices.driver();
  for (const Context& context : devices.contexts()) {
    const ScopedContext scoped(driver, context.get());
    bases_.emplace_back();
    for (const Exported& exported : exported_) {
      CUdeviceptr base = 0;
      Check(driver,
            driver.IpcOpenMemHandle(&base,
                                    HandleOf<CUipcMemHandle>(exported.handle, peer_),
                                    CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS),
            "cuIpcOpenMemHandle");
      opened_.emplace_back(driver, OpenedIpcHandle{context.get(), base});
      bases_.back().push_back(base);
    }
  }
}

}  // namespace jax_ub
