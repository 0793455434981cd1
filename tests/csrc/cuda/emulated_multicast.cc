// Emulates multicast objects. The host versions of kernels access the bound memory of
// every rank, in all processes, at the addresses to which this process has mapped it.
#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <new>
#include <stdexcept>
#include <utility>

#include "cuda/emulated_machine.h"

namespace jax_ub::emulated {

namespace {

constexpr char kTeamName[] = "jax_ub_emulated_team";

Team::Shared* MapTeam(int descriptor) {
  void* const mapped = mmap(nullptr, sizeof(Team::Shared), PROT_READ | PROT_WRITE,
                            MAP_SHARED, descriptor, 0);
  if (mapped == MAP_FAILED)
    throw std::runtime_error("a multicast object is not mapped");
  return static_cast<Team::Shared*>(mapped);
}

bool IsWhole(size_t bytes) { return bytes % static_cast<size_t>(kGranularity) == 0; }

int GpuOf(const Call& call, CUdevice device) {
  return call.machine.options.first_device + device;
}

// Returns the multicast object of a handle; nullptr if it is another handle, or the
// machine has no multicast.
Team* FindTeam(Call& call, CUmemGenericAllocationHandle handle) {
  const auto found = call.machine.memory.handles.find(handle);
  return found == call.machine.memory.handles.end() ? nullptr
                                                    : found->second.team.get();
}

bool IsDevice(const Call& call, CUdevice device) {
  return device >= 0 && device < call.machine.options.num_devices;
}

CUresult MulticastGetGranularity(size_t* granularity,
                                 const CUmulticastObjectProp* prop,
                                 CUmulticastGranularity_flags) {
  return Run("MulticastGetGranularity", [&](Call& call) {
    if (!call.machine.options.has_multicast) return CUDA_ERROR_NOT_SUPPORTED;
    if (granularity == nullptr || prop == nullptr || prop->size == 0) {
      return CUDA_ERROR_INVALID_VALUE;
    }
    *granularity = kGranularity;
    return CUDA_SUCCESS;
  });
}

CUresult MulticastCreate(CUmemGenericAllocationHandle* handle,
                         const CUmulticastObjectProp* prop) {
  return Run("MulticastCreate", [&](Call& call) {
    const EmulatedOptions& options = call.machine.options;
    if (!options.has_multicast) return CUDA_ERROR_NOT_SUPPORTED;
    if (handle == nullptr || prop == nullptr || prop->flags != 0 || prop->size == 0 ||
        !IsWhole(prop->size) || prop->numDevices < 1 ||
        prop->numDevices > Team::kMaxDevices) {
      return CUDA_ERROR_INVALID_VALUE;
    }
    if ((prop->handleTypes & CU_MEM_HANDLE_TYPE_FABRIC) != 0 && !options.has_fabric) {
      return CUDA_ERROR_NOT_SUPPORTED;
    }
    if (const CUresult refused = call.RefuseInCapture()) return refused;
    Memory::Handle made;
    made.team = Team::Make(static_cast<int>(prop->numDevices),
                           static_cast<int64_t>(prop->size));
    made.types = static_cast<unsigned>(prop->handleTypes);
    Memory& memory = call.machine.memory;
    memory.last_handle += 0x10;
    *handle = memory.last_handle;
    memory.handles[memory.last_handle] = std::move(made);
    return CUDA_SUCCESS;
  });
}

CUresult MulticastAddDevice(CUmemGenericAllocationHandle handle, CUdevice device) {
  return Run("MulticastAddDevice", [&](Call& call) {
    Team* const team = FindTeam(call, handle);
    if (team == nullptr) return CUDA_ERROR_INVALID_VALUE;
    if (!IsDevice(call, device)) return CUDA_ERROR_INVALID_DEVICE;
    if (!call.machine.options.has_multicast) return CUDA_ERROR_NOT_SUPPORTED;
    return team->Locked([&](Team::Shared& shared) {
      int* const end = shared.gpus + shared.num_added;
      if (shared.num_added == shared.num_devices ||
          std::find(&shared.gpus[0], end, GpuOf(call, device)) != end) {
        return CUDA_ERROR_INVALID_VALUE;
      }
      shared.gpus[shared.num_added++] = GpuOf(call, device);
      return CUDA_SUCCESS;
    });
  });
}

CUresult MulticastBindMem(CUmemGenericAllocationHandle handle,
                          size_t offset,
                          CUmemGenericAllocationHandle memory_handle,
                          size_t memory_offset,
                          size_t size,
                          unsigned long long flags) {
  return Run("MulticastBindMem", [&](Call& call) {
    Memory& memory = call.machine.memory;
    Team* const team = FindTeam(call, handle);
    const auto found = memory.handles.find(memory_handle);
    if (team == nullptr || found == memory.handles.end() || offset != 0 ||
        memory_offset != 0 || flags != 0 || size == 0 || !IsWhole(size)) {
      return CUDA_ERROR_INVALID_VALUE;
    }
    const MemoryFile* const file = found->second.file.get();
    const bool is_shared = memory.handles.at(handle).types != 0;
    if (file == nullptr || !file->is_own ||
        static_cast<int64_t>(size) > file->size_bytes ||
        (is_shared && found->second.types == 0)) {
      return CUDA_ERROR_INVALID_VALUE;
    }
    if (const CUresult refused = call.RefuseInCapture()) return refused;
    return team->Locked([&](Team::Shared& shared) {
      if (shared.num_added < shared.num_devices) {
        call.Violate("cuMulticastBindMem blocks: devices are missing");
        return CUDA_ERROR_UNKNOWN;
      }
      int* const end = shared.gpus + shared.num_added;
      if (std::find(&shared.gpus[0], end, file->gpu) == end ||
          static_cast<int64_t>(size) > shared.size_bytes ||
          shared.num_bound == shared.num_devices) {
        return CUDA_ERROR_INVALID_VALUE;
      }
      shared.bound[shared.num_bound++] = {file->gpu, file->id,
                                          static_cast<int64_t>(size)};
      ++memory.num_bindings;
      return CUDA_SUCCESS;
    });
  });
}

CUresult MulticastUnbind(CUmemGenericAllocationHandle handle,
                         CUdevice device,
                         size_t offset,
                         size_t size) {
  return Run("MulticastUnbind", [&](Call& call) {
    Team* const team = FindTeam(call, handle);
    if (team == nullptr || offset != 0) {
      call.Violate("cuMulticastUnbind of an object that is not there");
      return CUDA_ERROR_INVALID_VALUE;
    }
    for (const auto& [address, region] : call.machine.memory.regions()) {
      if (region->team.get() != team || region->num_uses == 0) continue;
      call.Violate("cuMulticastUnbind of memory that operations still use");
    }
    return team->Locked([&](Team::Shared& shared) {
      Team::Bound* const end = shared.bound + shared.num_bound;
      Team::Bound* const found =
          std::find_if(&shared.bound[0], end, [&](const Team::Bound& one) {
            return one.gpu == GpuOf(call, device) &&
                   one.size_bytes == static_cast<int64_t>(size);
          });
      if (found == end) {
        call.Violate("cuMulticastUnbind of what was not bound like that");
        return CUDA_ERROR_INVALID_VALUE;
      }
      std::move(found + 1, end, found);
      --shared.num_bound;
      --call.machine.memory.num_bindings;
      return CUDA_SUCCESS;
    });
  });
}

}  // namespace

Team::~Team() {
  if (shared != nullptr) munmap(shared, sizeof(Shared));
}

std::shared_ptr<Team> Team::Make(int num_devices, int64_t size_bytes) {
  auto team = std::make_shared<Team>();
  team->id = RandomBits();
  char name[64];
  std::snprintf(name, sizeof(name), "%s-%lx", kTeamName, team->id);
  team->descriptor = FileDescriptor(memfd_create(name, MFD_CLOEXEC));
  if (!team->descriptor || ftruncate(team->descriptor.get(), sizeof(Shared)) != 0) {
    throw std::runtime_error("the emulated driver cannot make a multicast object");
  }
  team->shared = new (MapTeam(team->descriptor.get())) Shared;
  team->shared->num_devices = num_devices;
  team->shared->size_bytes = size_bytes;
  return team;
}

std::shared_ptr<Team> Team::Open(int descriptor) {
  char target[256] = {};
  const std::string link = "/proc/self/fd/" + std::to_string(descriptor);
  if (readlink(link.c_str(), target, sizeof(target) - 1) <= 0) return nullptr;
  auto team = std::make_shared<Team>();
  const std::string format = std::string("/memfd:") + kTeamName + "-%lx";
  if (std::sscanf(target, format.c_str(), &team->id) != 1) return nullptr;
  team->descriptor = FileDescriptor(fcntl(descriptor, F_DUPFD_CLOEXEC, 3));
  if (!team->descriptor) return nullptr;
  team->shared = MapTeam(team->descriptor.get());
  return team;
}

std::shared_ptr<Team> Team::Find(int pid, int descriptor, uint64_t id) {
  const std::string path =
      "/proc/" + std::to_string(pid) + "/fd/" + std::to_string(descriptor);
  const FileDescriptor opened(open(path.c_str(), O_RDWR | O_CLOEXEC));
  if (!opened) return nullptr;
  auto team = Open(opened.get());
  return team != nullptr && team->id == id ? team : nullptr;
}

void FillMulticast(Driver& driver) {
  driver.MulticastGetGranularity = MulticastGetGranularity;
  driver.MulticastCreate = MulticastCreate;
  driver.MulticastAddDevice = MulticastAddDevice;
  driver.MulticastBindMem = MulticastBindMem;
  driver.MulticastUnbind = MulticastUnbind;
}

}  // namespace jax_ub::emulated
