// Tests shared memory in the emulated driver, by descriptors, fabric handles and IPC,
// and which devices may access it.
#include <sys/mman.h>
#include <sys/socket.h>
#include <unistd.h>

#include <atomic>
#include <cstring>
#include <new>
#include <vector>

#include "check.h"
#include "cuda/emulated_driver.h"
#include "cuda/emulated_gpu.h"
#include "processes.h"

using namespace jax_ub;

namespace {

const Driver& driver = EmulatedDriver();
using Gpu = EmulatedGpu;

constexpr size_t kSize = size_t{4} << 20;

CUmemAllocationProp Properties(int device, unsigned types) {
  CUmemAllocationProp prop = {};
  prop.type = CU_MEM_ALLOCATION_TYPE_PINNED;
  prop.location = {CU_MEM_LOCATION_TYPE_DEVICE, {device}};
  prop.requestedHandleTypes = static_cast<CUmemAllocationHandleType>(types);
  return prop;
}

CUresult Create(CUmemGenericAllocationHandle* handle, int device, unsigned types) {
  const CUmemAllocationProp prop = Properties(device, types);
  return driver.MemCreate(handle, kSize, &prop, 0);
}

CUresult SetAccess(CUdeviceptr address, int device) {
  CUmemAccessDesc access = {};
  access.location = {CU_MEM_LOCATION_TYPE_DEVICE, {device}};
  access.flags = CU_MEM_ACCESS_FLAGS_PROT_READWRITE;
  return driver.MemSetAccess(address, kSize, &access, 1);
}

// A mapping of a handle with access for a device.
class Mapping {
 public:
  Mapping(CUmemGenericAllocationHandle handle, int device) {
    Check(driver, driver.MemAddressReserve(&address_, kSize, 0, 0, 0), "reserve");
    Check(driver, driver.MemMap(address_, kSize, 0, handle, 0), "map");
    Check(driver, SetAccess(address_, device), "access");
  }
  ~Mapping() {
    driver.MemUnmap(address_, kSize);
    driver.MemAddressFree(address_, kSize);
  }
  Mapping(const Mapping&) = delete;

  CUdeviceptr get() const { return address_; }

 private:
  CUdeviceptr address_ = 0;
};

// Data that two processes exchange: a handle of 64 bytes, and their progress.
struct SetupExchange {
  unsigned char handle[64];
  std::atomic<int> stage{0};

  static SetupExchange& Make() {
    return *new (mmap(nullptr, sizeof(SetupExchange), PROT_READ | PROT_WRITE,
                      MAP_SHARED | MAP_ANONYMOUS, -1, 0)) SetupExchange;
  }
  void Await(int wanted) {
    while (stage < wanted) std::this_thread::sleep_for(std::chrono::microseconds(200));
  }
};

void SendDescriptor(int socket, int descriptor) {
  char byte = 0;
  iovec part = {&byte, 1};
  alignas(cmsghdr) char control[CMSG_SPACE(sizeof(int))] = {};
  msghdr message = {};
  message.msg_iov = &part;
  message.msg_iovlen = 1;
  message.msg_control = control;
  message.msg_controllen = sizeof(control);
  cmsghdr* const header = CMSG_FIRSTHDR(&message);
  header->cmsg_level = SOL_SOCKET;
  header->cmsg_type = SCM_RIGHTS;
  header->cmsg_len = CMSG_LEN(sizeof(int));
  std::memcpy(CMSG_DATA(header), &descriptor, sizeof(int));
  CHECK_EQ(sendmsg(socket, &message, 0), 1);
}

int ReceiveDescriptor(int socket) {
  char byte = 0;
  iovec part = {&byte, 1};
  alignas(cmsghdr) char control[CMSG_SPACE(sizeof(int))] = {};
  msghdr message = {};
  message.msg_iov = &part;
  message.msg_iovlen = 1;
  message.msg_control = control;
  message.msg_controllen = sizeof(control);
  CHECK_EQ(recvmsg(socket, &message, 0), 1);
  int descriptor = -1;
  std::memcpy(&descriptor, CMSG_DATA(CMSG_FIRSTHDR(&message)), sizeof(int));
  return descriptor;
}

void CheckAllPassed(Processes&& processes) {
  for (const std::string& text : processes.Join()) CHECK_EQ(text, "");
}

CUmemGenericAllocationHandle Import(void* shareable, CUmemAllocationHandleType type) {
  CUmemGenericAllocationHandle handle = 0;
  Check(driver, driver.MemImportFromShareableHandle(&handle, shareable, type),
        "import");
  return handle;
}

// Waits until the exporter of a fabric handle has ended; then no process can import it.
void AwaitEnd(void* fabric) {
  CUmemGenericAllocationHandle handle = 0;
  while (driver.MemImportFromShareableHandle(
             &handle, fabric, CU_MEM_HANDLE_TYPE_FABRIC) == CUDA_SUCCESS) {
    Check(driver, driver.MemRelease(handle), "release");
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
}

std::vector<uint32_t> Words(uint32_t value) {
  return std::vector<uint32_t>(1024, value);
}

}  // namespace

TEST(VirtualMemoryIsReachedOnlyAfterAccessIsSet) {
  EmulatedMachine machine({.num_devices = 3, .without_peer_access = {{2, 0}}});
  {
    const Gpu other(1);
    const Stream elsewhere(driver, 0);
    const Gpu gpu(0);
    const Stream stream(driver, 0);
    CUmemGenericAllocationHandle handle = 0;
    Check(driver, Create(&handle, 0, 0), "create");
    CUdeviceptr address = 0;
    Check(driver, driver.MemAddressReserve(&address, 2 * kSize, 0, 0, 0), "reserve");
    Check(driver, driver.MemMap(address, kSize, 0, handle, 0), "map");
    CHECK_EQ(driver.MemMap(address, kSize, 0, handle, 0), CUDA_ERROR_ALREADY_MAPPED);
    const auto fill = [&](const Stream& on) {
      return driver.MemsetD32Async(address, 1, 1024, on.get());
    };
    CHECK_EQ(fill(stream), CUDA_ERROR_ILLEGAL_ADDRESS);
    CHECK_EQ(SetAccess(address, 0), CUDA_SUCCESS);
    CHECK_EQ(fill(stream), CUDA_SUCCESS);
    CHECK_EQ(fill(elsewhere), CUDA_ERROR_ILLEGAL_ADDRESS);
    CHECK_EQ(SetAccess(address, 1), CUDA_SUCCESS);
    Gpu::Synchronize(stream.get());
    CHECK_EQ(fill(elsewhere), CUDA_SUCCESS);
    CHECK_EQ(SetAccess(address, 2), CUDA_ERROR_INVALID_DEVICE);
    CHECK_EQ(machine.Violations().size(), 2u);
    // A mapping outlives its handle, but not its addresses.
    Check(driver, driver.MemRelease(handle), "release");
    CHECK(Gpu::Read(elsewhere.get(), address, 1024) == Words(1));
    CHECK_EQ(driver.MemAddressFree(address, 2 * kSize), CUDA_ERROR_INVALID_VALUE);
    CHECK_EQ(driver.MemUnmap(address, kSize / 2), CUDA_ERROR_INVALID_VALUE);
    Check(driver, driver.MemUnmap(address, kSize), "unmap");
    CHECK_EQ(fill(stream), CUDA_ERROR_ILLEGAL_ADDRESS);
    CHECK_EQ(driver.MemAddressFree(address, kSize), CUDA_ERROR_INVALID_VALUE);
    Check(driver, driver.MemAddressFree(address, 2 * kSize), "free");
  }
  CHECK_EQ(machine.Live().Describe(), "");
}

TEST(SizesAndAddressesOfVirtualMemoryAreMultiplesOfItsGranularity) {
  EmulatedMachine machine;
  const CUmemAllocationProp prop = Properties(0, 0);
  size_t granularity = 0;
  Check(driver,
        driver.MemGetAllocationGranularity(&granularity, &prop,
                                           CU_MEM_ALLOC_GRANULARITY_RECOMMENDED),
        "granularity");
  CHECK_EQ(granularity, size_t{2} << 20);
  CUmemGenericAllocationHandle handle = 0;
  CHECK_EQ(driver.MemCreate(&handle, granularity / 2, &prop, 0),
           CUDA_ERROR_INVALID_VALUE);
  Check(driver, driver.MemCreate(&handle, granularity, &prop, 0), "create");
  CUdeviceptr address = 0;
  Check(driver, driver.MemAddressReserve(&address, kSize, 0, 0, 0), "reserve");
  CHECK_EQ(driver.MemMap(address + 4096, granularity, 0, handle, 0),
           CUDA_ERROR_INVALID_VALUE);
  CHECK_EQ(driver.MemMap(address, kSize, 0, handle, 0), CUDA_ERROR_INVALID_VALUE);
  CHECK_EQ(driver.MemMap(address + kSize, granularity, 0, handle, 0),
           CUDA_ERROR_INVALID_VALUE);
  CHECK_EQ(machine.Complaints(), "never given back: 1 memory handle, 1 reservation\n");
}

TEST(WhatADeviceLacksIsRefused) {
  const auto ask = [](CUdevice_attribute attribute) {
    int value = -1;
    Check(driver, driver.DeviceGetAttribute(&value, attribute, 0), "attribute");
    return value;
  };
  constexpr unsigned kFd = CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;
  constexpr unsigned kFabric = CU_MEM_HANDLE_TYPE_FABRIC;
  CUmemGenericAllocationHandle handle = 0;
  {
    EmulatedMachine machine({.has_vmm = false});
    CHECK_EQ(ask(CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED), 0);
    CHECK_EQ(Create(&handle, 0, 0), CUDA_ERROR_NOT_SUPPORTED);
  }
  {
    EmulatedMachine machine({.has_fd = false});
    CHECK_EQ(ask(CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED), 0);
    CHECK_EQ(Create(&handle, 0, kFd), CUDA_ERROR_NOT_SUPPORTED);
    CHECK_EQ(Create(&handle, 0, kFabric), CUDA_ERROR_NOT_SUPPORTED);
  }
  {
    EmulatedMachine machine({.has_fabric = true,
                             .fabric_result = CUDA_ERROR_NOT_PERMITTED,
                             .has_ipc = false});
    CHECK_EQ(ask(CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_FABRIC_SUPPORTED), 1);
    CHECK_EQ(Create(&handle, 0, kFabric | kFd), CUDA_ERROR_NOT_PERMITTED);
    Check(driver, Create(&handle, 0, kFd), "create");
    CUmemFabricHandle fabric;
    CHECK_EQ(driver.MemExportToShareableHandle(&fabric, handle,
                                               CU_MEM_HANDLE_TYPE_FABRIC, 0),
             CUDA_ERROR_INVALID_VALUE);
    Check(driver, driver.MemRelease(handle), "release");
    const Gpu gpu;
    const DeviceMemory memory(driver, 64);
    CUipcMemHandle ipc;
    CHECK_EQ(driver.IpcGetMemHandle(&ipc, memory.get()), CUDA_ERROR_NOT_SUPPORTED);
  }
}

TEST(DescriptorsShareMemoryBetweenProcesses) {
  SetupExchange& notes = SetupExchange::Make();
  int sockets[2];
  CHECK_EQ(socketpair(AF_UNIX, SOCK_STREAM, 0, sockets), 0);
  CheckAllPassed(Processes(2, [&](int process) {
    EmulatedMachine machine({.num_devices = 2});
    {
      const Gpu gpu(process);
      const Stream stream(driver, 0);
      CUmemGenericAllocationHandle handle = 0;
      if (process == 0) {
        Check(driver, Create(&handle, 0, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR),
              "create");
        int descriptor = -1;
        Check(driver,
              driver.MemExportToShareableHandle(
                  &descriptor, handle, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, 0),
              "export");
        SendDescriptor(sockets[0], descriptor);
        close(descriptor);
      } else {
        const int descriptor = ReceiveDescriptor(sockets[1]);
        handle = Import(reinterpret_cast<void*>(static_cast<intptr_t>(descriptor)),
                        CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR);
        close(descriptor);
      }
      const Mapping mapping(handle, process);
      Check(driver, driver.MemRelease(handle), "release");
      if (process == 0) {
        Gpu::Fill(stream.get(), mapping.get(), 5, 1024);
        Gpu::Synchronize(stream.get());
        notes.stage = 1;
        notes.Await(2);
        CHECK(Gpu::Read(stream.get(), mapping.get(), 1024) == Words(6));
      } else {
        notes.Await(1);
        CHECK(Gpu::Read(stream.get(), mapping.get(), 1024) == Words(5));
        Gpu::Fill(stream.get(), mapping.get(), 6, 1024);
        Gpu::Synchronize(stream.get());
        notes.stage = 2;
      }
    }
    CHECK_EQ(machine.Complaints(), "");
  }));
}

TEST(FabricHandlesShareMemoryThatOutlivesItsMaker) {
  SetupExchange& notes = SetupExchange::Make();
  CheckAllPassed(Processes(2, [&](int process) {
    EmulatedMachine machine({.first_device = process, .has_fabric = true});
    const Gpu gpu;
    const Stream stream(driver, 0);
    if (process == 0) {
      CUmemGenericAllocationHandle handle = 0;
      Check(driver, Create(&handle, 0, CU_MEM_HANDLE_TYPE_FABRIC), "create");
      const Mapping mapping(handle, 0);
      Gpu::Fill(stream.get(), mapping.get(), 8, 1024);
      Gpu::Synchronize(stream.get());
      Check(driver,
            driver.MemExportToShareableHandle(notes.handle, handle,
                                              CU_MEM_HANDLE_TYPE_FABRIC, 0),
            "export");
      notes.stage = 1;
      notes.Await(2);
      _exit(0);  // without giving anything back
    }
    notes.Await(1);
    const auto handle = Import(notes.handle, CU_MEM_HANDLE_TYPE_FABRIC);
    notes.stage = 2;
    AwaitEnd(notes.handle);
    const Mapping mapping(handle, 0);
    CHECK(Gpu::Read(stream.get(), mapping.get(), 1024) == Words(8));
    Check(driver, driver.MemRelease(handle), "release");
  }));
}

TEST(IpcHandlesAreForOtherProcesses) {
  SetupExchange& notes = SetupExchange::Make();
  CheckAllPassed(Processes(2, [&](int process) {
    EmulatedMachine machine;
    {
      const Gpu gpu;
      const Stream stream(driver, 0);
      CUipcMemHandle handle;
      CUdeviceptr opened = 0;
      constexpr unsigned kFlags = CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS;
      if (process == 0) {
        const DeviceMemory memory(driver, 4096);
        CHECK_EQ(driver.IpcGetMemHandle(&handle, memory.get() + 16),
                 CUDA_ERROR_INVALID_VALUE);
        Check(driver, driver.IpcGetMemHandle(&handle, memory.get()), "get");
        CHECK_EQ(driver.IpcOpenMemHandle(&opened, handle, kFlags),
                 CUDA_ERROR_INVALID_CONTEXT);
        std::memcpy(notes.handle, &handle, sizeof(handle));
        notes.stage = 1;
        notes.Await(2);
        CHECK(Gpu::Read(stream.get(), memory.get(), 1024) == Words(9));
        notes.stage = 3;
      } else {
        notes.Await(1);
        std::memcpy(&handle, notes.handle, sizeof(handle));
        CHECK_EQ(driver.IpcOpenMemHandle(&opened, handle, 0), CUDA_ERROR_INVALID_VALUE);
        Check(driver, driver.IpcOpenMemHandle(&opened, handle, kFlags), "open");
        CUdeviceptr again = 0;
        Check(driver, driver.IpcOpenMemHandle(&again, handle, kFlags), "open again");
        CHECK_EQ(again, opened);
        Gpu::Fill(stream.get(), opened, 9, 1024);
        Gpu::Synchronize(stream.get());
        Check(driver, driver.IpcCloseMemHandle(opened), "close");
        CHECK_EQ(machine.Live().ipc, 1);
        Check(driver, driver.IpcCloseMemHandle(opened), "close");
        CHECK_EQ(driver.MemsetD8Async(opened, 0, 1, stream.get()),
                 CUDA_ERROR_ILLEGAL_ADDRESS);
        notes.stage = 2;
        notes.Await(3);
      }
    }
    CHECK_EQ(machine.Live().Describe(), "");
  }));
}

TEST(DevicesOfOneMachineHaveTheSameNamesInAllProcesses) {
  const auto uuid = [](int first_device, int ordinal) {
    EmulatedMachine machine({.num_devices = 2, .first_device = first_device});
    CUuuid value;
    Check(driver, driver.DeviceGetUuid(&value, ordinal), "uuid");
    return std::string(value.bytes, sizeof(value.bytes));
  };
  CHECK(uuid(0, 1) == uuid(1, 0));
  CHECK(uuid(0, 0) != uuid(0, 1));
}

CHECK_MAIN()
