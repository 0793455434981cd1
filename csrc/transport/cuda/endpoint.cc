#include "transport/cuda/endpoint.h"

#include <algorithm>

#include "platform/error.h"
#include "transport/cuda/multicast.h"

namespace jax_ub {

namespace {

constexpr unsigned kFd = CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;
constexpr unsigned kFabric = CU_MEM_HANDLE_TYPE_FABRIC;

std::string UuidOf(const Driver& driver, CUdevice device) {
  CUuuid uuid = {};
  Check(driver, driver.DeviceGetUuid(&uuid, device), "cuDeviceGetUuid");
  return HexOf(&uuid, sizeof(uuid));
}

// Returns a reason such as "GPU 0 has no virtual memory management", or "" if all
// devices have the attribute.
std::string WhyLacks(const LocalDevices& devices,
                     CUdevice_attribute attribute,
                     const char* what) {
  for (const Context& context : devices.contexts()) {
    if (context.Attribute(attribute) == 0) {
      return "GPU " + std::to_string(context.device()) + " has no " + what;
    }
  }
  return "";
}

}  // namespace

CudaEndpoint::CudaEndpoint(const Driver& driver,
                           const std::vector<int>& ordinals,
                           int64_t slots_bytes,
                           const std::string& host,
                           bool nvls)
    : layout_(slots_bytes),
      nvls_(nvls),
      devices_(std::make_unique<LocalDevices>(driver, ordinals)) {
  DescribeDevices(host);
  TryVirtual();
  TryIpc();
  if (!nvls) return;
  const std::string reason = WhyNoMulticast(*devices_);
  capabilities_[reason.empty() ? kNvls : kCannotNvlsKey] =
      reason.empty() ? "yes" : reason;
}

void CudaEndpoint::DescribeDevices(const std::string& host) {
  const Driver& driver = devices_->driver();
  capabilities_[kHostKey] = host;
  std::string& gpus = capabilities_[kGpusKey];
  for (int n = 0; n < devices_->num_ranks(); ++n) {
    AppendItem(gpus, UuidOf(driver, devices_->context_of(n).device()));
  }
  int num_visible = 0;
  Check(driver, driver.DeviceGetCount(&num_visible), "cuDeviceGetCount");
  std::string& unreachable = capabilities_[kUnreachableKey];
  for (const CUdevice device : devices_->devices()) {
    for (int ordinal = 0; ordinal < num_visible; ++ordinal) {
      CUdevice peer = 0;
      Check(driver, driver.DeviceGet(&peer, ordinal), "cuDeviceGet");
      if (peer == device) continue;
      int can = 0;
      Check(driver, driver.DeviceCanAccessPeer(&can, device, peer),
            "cuDeviceCanAccessPeer");
      if (can != 0) continue;
      AppendItem(unreachable,
                 UuidOf(driver, device).append(">").append(UuidOf(driver, peer)));
    }
  }
}

// Allocates heaps that can be shared as file descriptors and as fabric handles, if the
// devices support both. If the allocation fails, tries again without fabric handles,
// because they need an IMEX channel, which the system may lack.
void CudaEndpoint::TryVirtual() {
  const std::string no_vmm =
      WhyLacks(*devices_, CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED,
               "virtual memory management");
  std::string no_fd = WhyLacks(
      *devices_, CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED,
      "memory handles that are descriptors");
  std::string no_fabric =
      WhyLacks(*devices_, CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_FABRIC_SUPPORTED,
               "memory handles for a fabric");
  if (!no_vmm.empty()) no_fd = no_fabric = no_vmm;
  const auto attempt = [&] {
    const unsigned types =
        (no_fd.empty() ? kFd : 0u) | (no_fabric.empty() ? kFabric : 0u);
    if (types == 0) return;
    try {
      heaps_ = LocalHeaps::Virtual(*devices_, layout_.size_bytes(), types);
    } catch (const SystemError& error) {
      (no_fabric.empty() ? no_fabric : no_fd) = error.what();
    }
  };
  attempt();
  if (!heaps_) attempt();
  const auto capabilities = [&](SharingMode mode, std::string reason, bool has_value) {
    if (heaps_ && reason.empty()) {
      try {
        const SetupMessage exported = heaps_.Export(mode);
        capabilities_[SharingModeName(mode)] = has_value ? exported.text : "yes";
        return;
      } catch (const SystemError& error) {
        reason = error.what();
      }
    }
    capabilities_[CannotKey(mode)] = reason;
  };
  capabilities(SharingMode::kVmm, no_fd, false);
  capabilities(SharingMode::kFabric, no_fabric, true);
  if (capabilities_.count(SharingModeName(SharingMode::kVmm)) +
          capabilities_.count(SharingModeName(SharingMode::kFabric)) ==
      0) {
    heaps_ = LocalHeaps();
  }
}

// Tests CUDA IPC. If TryVirtual has allocated the heaps, exports a small allocation as
// the test. Otherwise allocates the heaps for CUDA IPC and exports them.
void CudaEndpoint::TryIpc() {
  try {
    if (heaps_) {
      LocalHeaps::Allocated(*devices_, 1).Export(SharingMode::kIpc);
    } else {
      heaps_ = LocalHeaps::Allocated(*devices_, layout_.size_bytes());
      heaps_.Export(SharingMode::kIpc);
    }
    capabilities_[SharingModeName(SharingMode::kIpc)] = "yes";
  } catch (const Error& error) {
    // Without heaps, their allocation has failed, and so does the connection. With
    // heaps, the test of a small shared allocation has failed, so this process only
    // lacks CUDA IPC.
    if (!heaps_ && dynamic_cast<const CommunicatorError*>(&error) != nullptr) throw;
    if (!heaps_.is_virtual()) heaps_ = LocalHeaps();
    capabilities_[CannotKey(SharingMode::kIpc)] = error.what();
  }
}

}  // namespace jax_ub
