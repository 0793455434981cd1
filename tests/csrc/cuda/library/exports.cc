// Exports the emulated driver and cuBLASLt under the names that programs look up in
// libcuda.so.1 and libcublasLt.so.13: each symbol jumps to a function of their tables,
// with any arguments.
#include <dlfcn.h>

#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <iostream>
#include <iterator>
#include <string>

#include "cuda/emulated_cublaslt.h"
#include "cuda/emulated_driver.h"

// The functions of each table, in its order. The jumps are x86-64 instructions.
#define JAX_UB_DRIVER_FUNCTIONS                                                 \
  "cuInit,cuDriverGetVersion,cuGetErrorName,cuGetErrorString,cuDeviceGet,"      \
  "cuDeviceGetCount,cuDeviceGetAttribute,cuDeviceGetName,cuDeviceGetUuid_v2,"   \
  "cuDeviceTotalMem_v2,cuDeviceCanAccessPeer,cuDevicePrimaryCtxRetain,"         \
  "cuDevicePrimaryCtxRelease_v2,cuCtxSetCurrent,cuCtxGetCurrent,"               \
  "cuCtxEnablePeerAccess,cuCtxGetStreamPriorityRange,cuCtxSynchronize,"         \
  "cuStreamCreateWithPriority,cuStreamDestroy_v2,cuStreamSynchronize,"          \
  "cuStreamWaitEvent,cuStreamIsCapturing,cuStreamBeginCapture_v2,"              \
  "cuStreamEndCapture,cuGraphInstantiateWithFlags,cuGraphLaunch,"               \
  "cuGraphExecDestroy,cuGraphDestroy,cuEventCreate,cuEventRecord,cuEventQuery," \
  "cuEventSynchronize,cuEventElapsedTime_v2,cuEventDestroy_v2,cuMemAlloc_v2,"   \
  "cuMemFree_v2,cuMemAllocAsync,cuMemFreeAsync,cuMemHostAlloc,"                 \
  "cuMemHostGetDevicePointer_v2,cuMemFreeHost,cuMemcpyAsync,cuMemsetD8Async,"   \
  "cuMemsetD32Async,cuLibraryLoadData,cuLibraryGetKernel,cuLibraryUnload,"      \
  "cuKernelGetFunction,cuLaunchKernelEx,cuMemGetAllocationGranularity,"         \
  "cuMemCreate,cuMemRelease,cuMemAddressReserve,cuMemAddressFree,cuMemMap,"     \
  "cuMemUnmap,cuMemSetAccess,cuMemExportToShareableHandle,"                     \
  "cuMemImportFromShareableHandle,cuIpcGetMemHandle,cuIpcOpenMemHandle_v2,"     \
  "cuIpcCloseMemHandle,cuFuncLoad,cuMulticastCreate,cuMulticastAddDevice,"      \
  "cuMulticastBindMem,cuMulticastUnbind,cuMulticastGetGranularity"
#define JAX_UB_CUBLASLT_FUNCTIONS                                            \
  "cublasLtGetVersion,cublasLtGetStatusName,cublasLtCreate,cublasLtDestroy," \
  "cublasLtMatmulDescCreate,cublasLtMatmulDescDestroy,"                      \
  "cublasLtMatmulDescSetAttribute,cublasLtMatrixLayoutCreate,"               \
  "cublasLtMatrixLayoutDestroy,cublasLtMatrixLayoutSetAttribute,"            \
  "cublasLtMatmulPreferenceCreate,cublasLtMatmulPreferenceDestroy,"          \
  "cublasLtMatmulPreferenceSetAttribute,cublasLtMatmulAlgoGetHeuristic,"     \
  "cublasLtMatmul"

asm(R"(
  .macro jump name, table
    .globl \name
    .type \name, @function
    \name: jmp *\table + 8 * place(%rip)
    .set place, place + 1
  .endm
  .text
  .set place, 0
  .irp name, )" JAX_UB_DRIVER_FUNCTIONS R"(
    jump \name, jax_ub_driver
  .endr
  .set num_driver_functions, place
  .set place, 0
  .irp name, )" JAX_UB_CUBLASLT_FUNCTIONS R"(
    jump \name, jax_ub_cublaslt
  .endr
  .section .rodata
  .balign 8
  jax_ub_num_exported: .quad num_driver_functions, place
  .text
)");

namespace jax_ub {
// The tables that the jumps read.
extern "C" {
[[gnu::visibility("hidden")]] void* jax_ub_driver[sizeof(Driver) / sizeof(void*)];
constexpr size_t kFirstOfCublasLt = offsetof(CublasLt, GetVersion);
[[gnu::visibility("hidden")]] void*
    jax_ub_cublaslt[(sizeof(CublasLt) - kFirstOfCublasLt) / sizeof(void*)];
[[gnu::visibility("hidden")]] extern const uint64_t jax_ub_num_exported[2];
}

namespace {

int64_t Setting(const char* name, int64_t otherwise) {
  const char* const text = std::getenv(name);
  return text != nullptr ? std::atoll(text) : otherwise;
}

// Returns options of H100 GPUs, or of others with their limits, with the attributes that XLA divides by.
EmulatedOptions Options() {
  EmulatedOptions options;
  options.num_devices = static_cast<int>(Setting("EMULATED_GPUS", 1));
  options.device_memory_bytes = Setting("EMULATED_MIB", 512) << 20;
  options.seed = Setting("EMULATED_SEED", 1);
  options.max_delay_us = static_cast<int>(Setting("EMULATED_DELAY_US", 0));
  options.num_queues = static_cast<int>(Setting("EMULATED_QUEUES", options.num_queues));
  options.loads_drain_device = Setting("EMULATED_LOADS_DRAIN", 0) != 0;
  const auto capability = static_cast<int>(Setting("EMULATED_CAPABILITY", 90));
  options.attributes = {
      {CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR, capability / 10},
      {CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR, capability % 10},
      {CU_DEVICE_ATTRIBUTE_MAX_BLOCK_DIM_X, 1024},
      {CU_DEVICE_ATTRIBUTE_MAX_BLOCK_DIM_Y, 1024},
      {CU_DEVICE_ATTRIBUTE_MAX_BLOCK_DIM_Z, 64},
      {CU_DEVICE_ATTRIBUTE_MAX_GRID_DIM_X, 2147483647},
      {CU_DEVICE_ATTRIBUTE_MAX_GRID_DIM_Y, 65535},
      {CU_DEVICE_ATTRIBUTE_MAX_GRID_DIM_Z, 65535},
      {CU_DEVICE_ATTRIBUTE_MAX_THREADS_PER_MULTIPROCESSOR, 2048},
      {CU_DEVICE_ATTRIBUTE_MAX_BLOCKS_PER_MULTIPROCESSOR, 32},
      {CU_DEVICE_ATTRIBUTE_MAX_REGISTERS_PER_BLOCK, 65536},
      {CU_DEVICE_ATTRIBUTE_MAX_REGISTERS_PER_MULTIPROCESSOR, 65536},
      {CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK, 49152},
      {CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN, 232448},
      {CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_MULTIPROCESSOR, 233472},
      {CU_DEVICE_ATTRIBUTE_L2_CACHE_SIZE, 52428800},
      {CU_DEVICE_ATTRIBUTE_CLOCK_RATE, 1980000},
      {CU_DEVICE_ATTRIBUTE_MEMORY_CLOCK_RATE, 2619000},
      {CU_DEVICE_ATTRIBUTE_GLOBAL_MEMORY_BUS_WIDTH, 5120},
  };
  return options;
}

EmulatedMachine* machine = nullptr;

[[gnu::constructor]] void Begin() {
  static_assert(sizeof(jax_ub_driver) == sizeof(Driver));
  if (jax_ub_num_exported[0] != std::size(jax_ub_driver) ||
      jax_ub_num_exported[1] != std::size(jax_ub_cublaslt)) {
    std::cerr << "emulated GPU: the names of a table are not those of its functions\n";
    std::abort();
  }
  std::memcpy(jax_ub_driver, &EmulatedDriver(), sizeof(jax_ub_driver));
  std::memcpy(jax_ub_cublaslt, &EmulatedCublasLt().GetVersion, sizeof(jax_ub_cublaslt));
  machine = new EmulatedMachine(Options());  // for good: XLA ends without its work
}

// Prints the violations of the driver's rules when the program ends.
[[gnu::destructor]] void End() {
  for (const std::string& text : machine->Violations()) {
    std::cerr << "emulated GPU: " << text << std::endl;
  }
}

}  // namespace

}  // namespace jax_ub
