#include "transport/cuda/virtual_memory.h"

#include <string>
#include <utility>
#include <vector>

#include "platform/error.h"

namespace jax_ub {

CommunicatorError NoRoom(int64_t size_bytes, const std::string& text) {
  return CommunicatorError("CommunicatorError: jax_ub: a heap of " +
                           std::to_string(size_bytes) + " bytes: " + text +
                           ". A smaller shape of initialize_ub needs less, a lower "
                           "XLA_CLIENT_MEM_FRACTION leaves more");
}

PhysicalMemory ImportMemory(const Driver& driver,
                            CUmemAllocationHandleType type,
                            void* shareable) {
  CUmemGenericAllocationHandle memory = 0;
  Check(driver, driver.MemImportFromShareableHandle(&memory, shareable, type),
        "cuMemImportFromShareableHandle");
  return {driver, memory};
}

void ExportMemory(const PhysicalMemory& memory,
                  CUmemAllocationHandleType type,
                  void* shareable) {
  const Driver& driver = memory.driver();
  Check(driver, driver.MemExportToShareableHandle(shareable, memory.get(), type, 0),
        "cuMemExportToShareableHandle");
}

Mapping::Mapping(const Driver& driver,
                 CUmemGenericAllocationHandle memory,
                 size_t size,
                 size_t alignment,
                 std::span<const CUdevice> accessed_by) {
  CUdeviceptr base = 0;
  Check(driver, driver.MemAddressReserve(&base, size, alignment, 0, 0),
        "cuMemAddressReserve");
  reserved_ = {driver, {base, size}};
  Check(driver, driver.MemMap(base, size, 0, memory, 0), "cuMemMap");
  mapped_ = {driver, {base, size}};
  std::vector<CUmemAccessDesc> access(accessed_by.size());
  for (size_t i = 0; i < access.size(); ++i) {
    access[i].location.type = CU_MEM_LOCATION_TYPE_DEVICE;
    access[i].location.id = accessed_by[i];
    access[i].flags = CU_MEM_ACCESS_FLAGS_PROT_READWRITE;
  }
  Check(driver, driver.MemSetAccess(base, size, access.data(), access.size()),
        "cuMemSetAccess");
}

VirtualMemory VirtualMemory::Create(const Driver& driver,
                                    CUdevice device,
                                    int64_t size_bytes,
                                    unsigned handle_types,
                                    std::span<const CUdevice> accessed_by) {
  CUmemAllocationProp properties = {};
  properties.type = CU_MEM_ALLOCATION_TYPE_PINNED;
  properties.requestedHandleTypes =
      static_cast<CUmemAllocationHandleType>(handle_types);
  properties.location = {};
  properties.location.type = CU_MEM_LOCATION_TYPE_DEVICE;
  properties.location.id = device;
  size_t unit = 0;
  Check(driver,
        driver.MemGetAllocationGranularity(&unit, &properties,
                                           CU_MEM_ALLOC_GRANULARITY_RECOMMENDED),
        "cuMemGetAllocationGranularity");
  const size_t size = (static_cast<size_t>(size_bytes) + unit - 1) / unit * unit;
  CUmemGenericAllocationHandle memory = 0;
  const CUresult result = driver.MemCreate(&memory, size, &properties, 0);
  if (result == CUDA_ERROR_OUT_OF_MEMORY) {
    throw NoRoom(static_cast<int64_t>(size),
                 "cuMemCreate: " + DescribeResult(driver, result));
  }
  Check(driver, result, "cuMemCreate");
  return VirtualMemory({driver, memory}, size, accessed_by);
}

VirtualMemory::VirtualMemory(PhysicalMemory memory,
                             size_t size,
                             std::span<const CUdevice> accessed_by)
    : memory_(std::move(memory)),
      mapping_(memory_.driver(), memory_.get(), size, 0, accessed_by) {}

}  // namespace jax_ub
