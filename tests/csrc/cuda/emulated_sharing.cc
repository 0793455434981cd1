// Emulates virtual memory that processes share by descriptors or fabric handles, and
// IPC.
#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <bit>
#include <cstring>
#include <utility>

#include "cuda/emulated_machine.h"

namespace jax_ub::emulated {

namespace {

// The contents of a fabric handle or an IPC handle, which have 64 bytes.
struct Sharing {
  char magic[8];
  int pid;
  int descriptor;
  uint64_t id;
  int gpu;
  int64_t size_bytes;

  static constexpr char kFabric[] = "fabric";
  static constexpr char kTeam[] = "team";
  static constexpr char kIpc[] = "ipc";

  static Sharing Of(const MemoryFile& file, const char* magic, int64_t size_bytes) {
    Sharing sharing = {};
    std::strcpy(sharing.magic, magic);
    sharing.pid = getpid();
    sharing.descriptor = file.descriptor.get();
    sharing.id = file.id;
    sharing.gpu = file.gpu;
    sharing.size_bytes = size_bytes;
    return sharing;
  }
  static Sharing Of(const Team& team) {
    Sharing sharing = {};
    std::strcpy(sharing.magic, kTeam);
    sharing.pid = getpid();
    sharing.descriptor = team.descriptor.get();
    sharing.id = team.id;
    return sharing;
  }
  bool Is(const char* what) const { return std::strcmp(magic, what) == 0; }
};
static_assert(sizeof(Sharing) <= 64 && sizeof(CUmemFabricHandle) == 64 &&
              sizeof(CUipcMemHandle) == 64);

// Returns the ordinal here of a GPU of the machine; -1: this process does not see it.
int OrdinalOf(const Call& call, int gpu) {
  const int ordinal = gpu - call.machine.options.first_device;
  return ordinal >= 0 && ordinal < call.machine.options.num_devices ? ordinal : -1;
}

bool IsMultiple(uint64_t value, uint64_t unit) { return value % unit == 0; }

CUresult CheckHasVmm(Call& call) {
  return call.machine.options.has_vmm ? CUDA_SUCCESS : CUDA_ERROR_NOT_SUPPORTED;
}

CUresult CheckProperties(Call& call, const CUmemAllocationProp* prop) {
  if (prop == nullptr || prop->type != CU_MEM_ALLOCATION_TYPE_PINNED ||
      prop->location.type != CU_MEM_LOCATION_TYPE_DEVICE) {
    return CUDA_ERROR_INVALID_VALUE;
  }
  if (prop->location.id < 0 || prop->location.id >= call.machine.options.num_devices) {
    return CUDA_ERROR_INVALID_DEVICE;
  }
  constexpr unsigned kKnown =
      CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR | CU_MEM_HANDLE_TYPE_FABRIC;
  return (prop->requestedHandleTypes & ~kKnown) != 0 ? CUDA_ERROR_NOT_SUPPORTED
                                                     : CUDA_SUCCESS;
}

CUresult MemGetAllocationGranularity(size_t* granularity,
                                     const CUmemAllocationProp* prop,
                                     CUmemAllocationGranularity_flags) {
  return Run("MemGetAllocationGranularity", [&](Call& call) {
    if (const CUresult refused = CheckHasVmm(call)) return refused;
    if (granularity == nullptr) return CUDA_ERROR_INVALID_VALUE;
    if (const CUresult refused = CheckProperties(call, prop)) return refused;
    *granularity = kGranularity;
    return CUDA_SUCCESS;
  });
}

CUresult AddHandle(Call& call,
                   CUmemGenericAllocationHandle* handle,
                   Memory::Handle added) {
  Memory& memory = call.machine.memory;
  memory.last_handle += 0x10;
  memory.handles[memory.last_handle] = std::move(added);
  *handle = memory.last_handle;
  return CUDA_SUCCESS;
}

CUresult MemCreate(CUmemGenericAllocationHandle* handle,
                   size_t size_bytes,
                   const CUmemAllocationProp* prop,
                   unsigned long long flags) {
  return Run("MemCreate", [&](Call& call) {
    const EmulatedOptions& options = call.machine.options;
    if (const CUresult refused = CheckHasVmm(call)) return refused;
    if (const CUresult refused = CheckProperties(call, prop)) return refused;
    if (handle == nullptr || flags != 0 || size_bytes == 0 ||
        !IsMultiple(size_bytes, kGranularity)) {
      return CUDA_ERROR_INVALID_VALUE;
    }
    if (const CUresult refused = call.RefuseInCapture()) return refused;
    const auto types = static_cast<unsigned>(prop->requestedHandleTypes);
    if ((types & CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR) != 0 && !options.has_fd) {
      return CUDA_ERROR_NOT_SUPPORTED;
    }
    if ((types & CU_MEM_HANDLE_TYPE_FABRIC) != 0) {
      if (!options.has_fabric) return CUDA_ERROR_NOT_SUPPORTED;
      if (options.fabric_result != CUDA_SUCCESS) return options.fabric_result;
    }
    const int device = prop->location.id;
    const auto size = static_cast<int64_t>(size_bytes);
    if (size > FreeBytes(call.machine, device)) return CUDA_ERROR_OUT_OF_MEMORY;
    Memory::Handle made;
    made.file = MemoryFile::Make(options.first_device + device, size);
    made.device = device;
    made.types = types;
    return AddHandle(call, handle, std::move(made));
  });
}

CUresult MemRelease(CUmemGenericAllocationHandle handle) {
  return Run("MemRelease", [&](Call& call) {
    if (call.machine.memory.handles.erase(handle) != 0) return CUDA_SUCCESS;
    call.Violate("cuMemRelease of a handle that is not there");
    return CUDA_ERROR_INVALID_VALUE;
  });
}

CUresult MemExportToShareableHandle(void* shareable,
                                    CUmemGenericAllocationHandle handle,
                                    CUmemAllocationHandleType type,
                                    unsigned long long flags) {
  return Run("MemExportToShareableHandle", [&](Call& call) {
    const auto found = call.machine.memory.handles.find(handle);
    if (shareable == nullptr || flags != 0 ||
        found == call.machine.memory.handles.end() ||
        (found->second.types & static_cast<unsigned>(type)) == 0) {
      return CUDA_ERROR_INVALID_VALUE;
    }
    const MemoryFile* const file = found->second.file.get();
    const Team* const team = found->second.team.get();
    if (type == CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR) {
      const FileDescriptor& opened = file ? file->descriptor : team->descriptor;
      const int descriptor = fcntl(opened.get(), F_DUPFD_CLOEXEC, 3);
      if (descriptor < 0) return CUDA_ERROR_OPERATING_SYSTEM;
      std::memcpy(shareable, &descriptor, sizeof(descriptor));
      return CUDA_SUCCESS;
    }
    const Sharing sharing = file
                                ? Sharing::Of(*file, Sharing::kFabric, file->size_bytes)
                                : Sharing::Of(*team);
    std::memset(shareable, 0, sizeof(CUmemFabricHandle));
    std::memcpy(shareable, &sharing, sizeof(sharing));
    return CUDA_SUCCESS;
  });
}

// Opens the file or team of a shared handle; the result is empty if it is invalid.
Memory::Handle OpenShareable(void* shareable, CUmemAllocationHandleType type) {
  Memory::Handle opened;
  opened.types = static_cast<unsigned>(type);
  if (type == CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR) {
    const auto descriptor = static_cast<int>(reinterpret_cast<intptr_t>(shareable));
    opened.file = MemoryFile::Open(descriptor);
    if (opened.file == nullptr) opened.team = Team::Open(descriptor);
    return opened;
  }
  Sharing sharing;
  std::memcpy(&sharing, shareable, sizeof(sharing));
  if (sharing.Is(Sharing::kFabric)) {
    opened.file = MemoryFile::Find(sharing.pid, sharing.descriptor, sharing.id);
  } else if (sharing.Is(Sharing::kTeam)) {
    opened.team = Team::Find(sharing.pid, sharing.descriptor, sharing.id);
  }
  return opened;
}

// The caller remains the owner of the descriptor.
CUresult MemImportFromShareableHandle(CUmemGenericAllocationHandle* handle,
                                      void* shareable,
                                      CUmemAllocationHandleType type) {
  return Run("MemImportFromShareableHandle", [&](Call& call) {
    if (const CUresult refused = CheckHasVmm(call)) return refused;
    const bool is_fabric = type == CU_MEM_HANDLE_TYPE_FABRIC;
    if (!is_fabric && type != CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR) {
      return CUDA_ERROR_INVALID_VALUE;
    }
    if (handle == nullptr || (is_fabric && shareable == nullptr)) {
      return CUDA_ERROR_INVALID_VALUE;
    }
    if (const CUresult refused = call.RefuseInCapture()) return refused;
    const EmulatedOptions& options = call.machine.options;
    if (is_fabric && !options.has_fabric) return CUDA_ERROR_NOT_SUPPORTED;
    if (is_fabric && options.fabric_result != CUDA_SUCCESS)
      return options.fabric_result;
    if (!is_fabric && !options.has_fd) return CUDA_ERROR_NOT_SUPPORTED;
    Memory::Handle imported = OpenShareable(shareable, type);
    if (imported.file != nullptr) {
      imported.device = OrdinalOf(call, imported.file->gpu);
    } else if (imported.team == nullptr) {
      return CUDA_ERROR_INVALID_VALUE;
    }
    return AddHandle(call, handle, std::move(imported));
  });
}

CUresult MemAddressReserve(CUdeviceptr* pointer,
                           size_t size_bytes,
                           size_t alignment,
                           CUdeviceptr,
                           unsigned long long flags) {
  return Run("MemAddressReserve", [&](Call& call) {
    if (const CUresult refused = CheckHasVmm(call)) return refused;
    const auto page = static_cast<uint64_t>(sysconf(_SC_PAGESIZE));
    if (pointer == nullptr || flags != 0 || size_bytes == 0 ||
        !IsMultiple(size_bytes, page) ||
        (alignment != 0 && !std::has_single_bit(alignment))) {
      return CUDA_ERROR_INVALID_VALUE;
    }
    if (const CUresult refused = call.RefuseInCapture()) return refused;
    const auto size = static_cast<int64_t>(size_bytes);
    *pointer = Memory::Reserve(
        size, std::max<int64_t>(static_cast<int64_t>(alignment), kGranularity));
    if (*pointer == 0) return CUDA_ERROR_OUT_OF_MEMORY;
    call.machine.memory.reservations[*pointer] = size;
    return CUDA_SUCCESS;
  });
}

// Returns whether no region overlaps these addresses.
bool AreEmpty(Memory& memory, uint64_t address, uint64_t size_bytes) {
  const auto next = memory.regions().lower_bound(address);
  return memory.Around(address) == nullptr &&
         (next == memory.regions().end() || next->first >= address + size_bytes);
}

CUresult MemAddressFree(CUdeviceptr pointer, size_t size_bytes) {
  return Run("MemAddressFree", [&](Call& call) {
    Memory& memory = call.machine.memory;
    const auto found = memory.reservations.find(pointer);
    if (found == memory.reservations.end() ||
        found->second != static_cast<int64_t>(size_bytes)) {
      call.Violate("cuMemAddressFree of what was not reserved like that");
      return CUDA_ERROR_INVALID_VALUE;
    }
    if (!AreEmpty(memory, pointer, size_bytes)) {
      call.Violate("cuMemAddressFree of addresses that are mapped");
      return CUDA_ERROR_INVALID_VALUE;
    }
    memory.reservations.erase(found);
    return CUDA_SUCCESS;
  });
}

bool IsReserved(const Memory& memory, uint64_t address, uint64_t size_bytes) {
  auto found = memory.reservations.upper_bound(address);
  if (found == memory.reservations.begin()) return false;
  --found;
  return address + size_bytes <= found->first + static_cast<uint64_t>(found->second);
}

int64_t SizeOf(const Memory::Handle& handle) {
  if (handle.file != nullptr) return handle.file->size_bytes;
  return handle.team->Locked(
      [](const Team::Shared& shared) { return shared.size_bytes; });
}

bool HasAllDevices(Team& team) {
  return team.Locked([](const Team::Shared& shared) {
    return shared.num_added == shared.num_devices;
  });
}

CUresult MemMap(CUdeviceptr pointer,
                size_t size_bytes,
                size_t offset,
                CUmemGenericAllocationHandle handle,
                unsigned long long flags) {
  return Run("MemMap", [&](Call& call) {
    Memory& memory = call.machine.memory;
    const auto found = memory.handles.find(handle);
    if (found == memory.handles.end() || flags != 0 || offset != 0 || size_bytes == 0 ||
        !IsMultiple(size_bytes, kGranularity) || !IsMultiple(pointer, kGranularity) ||
        static_cast<int64_t>(size_bytes) > SizeOf(found->second) ||
        !IsReserved(memory, pointer, size_bytes)) {
      return CUDA_ERROR_INVALID_VALUE;
    }
    if (const CUresult refused = call.RefuseInCapture()) return refused;
    if (!AreEmpty(memory, pointer, size_bytes)) return CUDA_ERROR_ALREADY_MAPPED;
    auto region = std::make_shared<Region>();
    region->kind = Region::Kind::kVirtual;
    region->address = pointer;
    region->size_bytes = static_cast<int64_t>(size_bytes);
    region->device = found->second.device;
    region->file = found->second.file;
    region->team = found->second.team;
    if (region->team != nullptr && !HasAllDevices(*region->team)) {
      call.Violate("cuMemMap of a multicast object blocks: devices are missing");
    }
    memory.Add(std::move(region), false);
    return CUDA_SUCCESS;
  });
}

// Returns the mappings that exactly cover these addresses; none if they do not.
std::vector<SharedRegion> MappingsIn(const Memory& memory,
                                     uint64_t address,
                                     uint64_t size_bytes) {
  std::vector<SharedRegion> regions;
  uint64_t next = address;
  while (next < address + size_bytes) {
    const SharedRegion region = memory.Find(next, Region::Kind::kVirtual);
    if (region == nullptr) return {};
    regions.push_back(region);
    next += static_cast<uint64_t>(region->size_bytes);
  }
  return next == address + size_bytes ? regions : std::vector<SharedRegion>{};
}

CUresult MemUnmap(CUdeviceptr pointer, size_t size_bytes) {
  return Run("MemUnmap", [&](Call& call) {
    Memory& memory = call.machine.memory;
    const auto regions = MappingsIn(memory, pointer, size_bytes);
    if (regions.empty()) {
      call.Violate("cuMemUnmap of what was not mapped like that");
      return CUDA_ERROR_INVALID_VALUE;
    }
    if (const CUresult refused = call.RefuseInCapture()) return refused;
    for (const SharedRegion& region : regions) {
      if (region->num_uses > 0) {
        call.Violate("cuMemUnmap of memory that " + std::to_string(region->num_uses) +
                     " operations still use");
      }
      memory.Remove(region->address);
    }
    return CUDA_SUCCESS;
  });
}

CUresult CheckAccess(const Call& call,
                     const CUmemAccessDesc& access,
                     const Region& region) {
  const EmulatedOptions& options = call.machine.options;
  if (access.location.type != CU_MEM_LOCATION_TYPE_DEVICE)
    return CUDA_ERROR_INVALID_VALUE;
  const int device = access.location.id;
  if (device < 0 || device >= options.num_devices) return CUDA_ERROR_INVALID_DEVICE;
  // Of a GPU that this process does not see, only peer access can be checked.
  const bool can =
      region.device == device ||
      (region.device < 0 ? options.has_peer_access
                         : call.machine.CanAccessPeer(device, region.device));
  return can ? CUDA_SUCCESS : CUDA_ERROR_INVALID_DEVICE;
}

CUresult MemSetAccess(CUdeviceptr pointer,
                      size_t size_bytes,
                      const CUmemAccessDesc* accesses,
                      size_t count) {
  return Run("MemSetAccess", [&](Call& call) {
    const auto regions = MappingsIn(call.machine.memory, pointer, size_bytes);
    if (regions.empty() || accesses == nullptr || count == 0) {
      return CUDA_ERROR_INVALID_VALUE;
    }
    if (const CUresult refused = call.RefuseInCapture()) return refused;
    for (const SharedRegion& region : regions) {
      for (size_t i = 0; i < count; ++i) {
        if (const CUresult bad = CheckAccess(call, accesses[i], *region)) return bad;
        if (accesses[i].flags == CU_MEM_ACCESS_FLAGS_PROT_NONE) {
          region->accessible.erase(accesses[i].location.id);
        } else {
          region->accessible.insert(accesses[i].location.id);
        }
      }
      const int protection =
          region->accessible.empty() ? PROT_NONE : PROT_READ | PROT_WRITE;
      mprotect(reinterpret_cast<void*>(region->address), region->mapped_bytes,
               protection);
    }
    return CUDA_SUCCESS;
  });
}

CUresult IpcGetMemHandle(CUipcMemHandle* handle, CUdeviceptr pointer) {
  return RunInContext("IpcGetMemHandle", [&](Call& call) {
    if (!call.machine.options.has_ipc) return CUDA_ERROR_NOT_SUPPORTED;
    const SharedRegion region =
        call.machine.memory.Find(pointer, Region::Kind::kDevice);
    if (handle == nullptr || region == nullptr) return CUDA_ERROR_INVALID_VALUE;
    const Sharing sharing =
        Sharing::Of(*region->file, Sharing::kIpc, region->size_bytes);
    std::memset(handle, 0, sizeof(*handle));
    std::memcpy(handle, &sharing, sizeof(sharing));
    return CUDA_SUCCESS;
  });
}

// Returns the region of an IPC handle that is already open in the current context.
SharedRegion FindOpened(const Call& call, uint64_t id) {
  for (const auto& [address, region] : call.machine.memory.regions()) {
    if (region->kind == Region::Kind::kIpc && region->file->id == id &&
        region->device == call.device()) {
      return region;
    }
  }
  return nullptr;
}

CUresult IpcOpenMemHandle(CUdeviceptr* pointer, CUipcMemHandle handle, unsigned flags) {
  return RunInContext("IpcOpenMemHandle", [&](Call& call) {
    if (!call.machine.options.has_ipc) return CUDA_ERROR_NOT_SUPPORTED;
    Sharing sharing;
    std::memcpy(&sharing, &handle, sizeof(sharing));
    if (pointer == nullptr || flags != CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS ||
        !sharing.Is(Sharing::kIpc)) {
      return CUDA_ERROR_INVALID_VALUE;
    }
    if (sharing.pid == getpid()) return CUDA_ERROR_INVALID_CONTEXT;
    if (const CUresult refused = call.RefuseInCapture()) return refused;
    const int owner = OrdinalOf(call, sharing.gpu);
    const bool can_access =
        owner == call.device() ||
        (owner < 0 ? call.machine.options.has_peer_access
                   : call.machine.CanAccessPeer(call.device(), owner));
    if (!can_access) return CUDA_ERROR_PEER_ACCESS_UNSUPPORTED;
    SharedRegion region = FindOpened(call, sharing.id);
    if (region == nullptr) {
      region = std::make_shared<Region>();
      region->kind = Region::Kind::kIpc;
      region->device = call.device();
      region->size_bytes = sharing.size_bytes;
      region->file = MemoryFile::Find(sharing.pid, sharing.descriptor, sharing.id);
      if (region->file == nullptr) return CUDA_ERROR_INVALID_HANDLE;
      region->address = Memory::Reserve(region->size_bytes, 1);
      if (region->address == 0) return CUDA_ERROR_MAP_FAILED;
      call.machine.memory.Add(region, true);
    }
    ++call.machine.memory.num_opened[region->address];
    *pointer = region->address;
    return CUDA_SUCCESS;
  });
}

CUresult IpcCloseMemHandle(CUdeviceptr pointer) {
  return RunInContext("IpcCloseMemHandle", [&](Call& call) {
    Memory& memory = call.machine.memory;
    const SharedRegion region = memory.Find(pointer, Region::Kind::kIpc);
    if (region == nullptr) {
      call.Violate("cuIpcCloseMemHandle of what is not open");
      return CUDA_ERROR_INVALID_VALUE;
    }
    if (const CUresult refused = call.RefuseInCapture()) return refused;
    if (--memory.num_opened[pointer] > 0) return CUDA_SUCCESS;
    if (region->num_uses > 0) {
      call.Violate("cuIpcCloseMemHandle of memory that " +
                   std::to_string(region->num_uses) + " operations still use");
    }
    memory.num_opened.erase(pointer);
    memory.Remove(pointer);
    return CUDA_SUCCESS;
  });
}

}  // namespace

void FillVirtualMemory(Driver& driver) {
  driver.MemGetAllocationGranularity = MemGetAllocationGranularity;
  driver.MemCreate = MemCreate;
  driver.MemRelease = MemRelease;
  driver.MemAddressReserve = MemAddressReserve;
  driver.MemAddressFree = MemAddressFree;
  driver.MemMap = MemMap;
  driver.MemUnmap = MemUnmap;
  driver.MemSetAccess = MemSetAccess;
  driver.MemExportToShareableHandle = MemExportToShareableHandle;
  driver.MemImportFromShareableHandle = MemImportFromShareableHandle;
}

void FillIpc(Driver& driver) {
  driver.IpcGetMemHandle = IpcGetMemHandle;
  driver.IpcOpenMemHandle = IpcOpenMemHandle;
  driver.IpcCloseMemHandle = IpcCloseMemHandle;
}

}  // namespace jax_ub::emulated
