// Emulates libraries of kernels, and launches. The image of a library is ignored: a
// kernel is the host function with its name.
#include <cstring>
#include <exception>
#include <utility>

#include "cuda/emulated_machine.h"

namespace jax_ub::emulated {

namespace {

constexpr unsigned kMaxBlockSize = 1024;
constexpr unsigned kMaxClusterSize = 8;

CUresult LibraryLoadData(CUlibrary* library,
                         const void* image,
                         CUjit_option*,
                         void**,
                         unsigned num_jit_options,
                         CUlibraryOption*,
                         void**,
                         unsigned num_options) {
  return Run("LibraryLoadData", [&](Call& call) {
    if (library == nullptr || image == nullptr) return CUDA_ERROR_INVALID_VALUE;
    if (num_jit_options != 0 || num_options != 0) return CUDA_ERROR_NOT_SUPPORTED;
    if (const CUresult refused = call.RefuseInCapture()) return refused;
    call.Drain();
    *library = reinterpret_cast<CUlibrary>(call.machine.libraries.Add({})->handle);
    return CUDA_SUCCESS;
  });
}

CUresult LibraryUnload(CUlibrary library) {
  return Run("LibraryUnload", [&](Call& call) {
    if (const CUresult refused = call.RefuseInCapture()) return refused;
    if (call.machine.libraries.Remove(library)) return CUDA_SUCCESS;
    call.Violate("cuLibraryUnload of a library that is not there");
    return CUDA_ERROR_INVALID_HANDLE;
  });
}

CUresult LibraryGetKernel(CUkernel* kernel, CUlibrary library, const char* name) {
  return Run("LibraryGetKernel", [&](Call& call) {
    if (kernel == nullptr || name == nullptr) return CUDA_ERROR_INVALID_VALUE;
    const Library* const found = call.machine.libraries.Find(library);
    if (found == nullptr) return CUDA_ERROR_INVALID_HANDLE;
    const EmulatedKernel* const twin = FindEmulatedKernel(name);
    if (twin == nullptr) return CUDA_ERROR_NOT_FOUND;
    const Kernel* const made =
        call.machine.kernels.Add({.library = found->handle, .twin = twin});
    *kernel = reinterpret_cast<CUkernel>(made->handle);
    return CUDA_SUCCESS;
  });
}

CUresult KernelGetFunction(CUfunction* function, CUkernel kernel) {
  return RunInContext("KernelGetFunction", [&](Call& call) {
    const Kernel* const found = call.machine.kernels.Find(kernel);
    if (function == nullptr) return CUDA_ERROR_INVALID_VALUE;
    if (found == nullptr) return CUDA_ERROR_INVALID_HANDLE;
    const Function* const made =
        call.machine.functions.Add({.kernel = found->handle, .device = call.device()});
    *function = reinterpret_cast<CUfunction>(made->handle);
    return CUDA_SUCCESS;
  });
}

CUresult FuncLoad(CUfunction function) {
  return RunInContext("FuncLoad", [&](Call& call) {
    Function* const found = call.machine.functions.Find(function);
    if (found == nullptr) return CUDA_ERROR_INVALID_HANDLE;
    if (!std::exchange(found->is_loaded, true)) call.Drain();
    return CUDA_SUCCESS;
  });
}

// Returns the host version of a function, or of a kernel on this device; nullptr if
// there is none or it was unloaded.
const EmulatedKernel* FindTwin(Call& call, CUfunction function, int device) {
  const Function* const found = call.machine.functions.Find(function);
  if (found != nullptr && found->device != device) return nullptr;
  const Kernel* const kernel = call.machine.kernels.Find(
      found != nullptr ? reinterpret_cast<CUfunction>(found->kernel) : function);
  if (kernel == nullptr || (found == nullptr && call.device() != device))
    return nullptr;
  const bool is_loaded = call.machine.libraries.Find(
                             reinterpret_cast<CUlibrary>(kernel->library)) != nullptr;
  return is_loaded ? kernel->twin : nullptr;
}

// Checks the cluster attributes of a launch as a device of this compute capability
// does.
CUresult CheckCluster(const Call& call, const CUlaunchConfig& config) {
  for (unsigned i = 0; i < config.numAttrs; ++i) {
    if (config.attrs[i].id != CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION) continue;
    const auto& cluster = config.attrs[i].value.clusterDim;
    const auto& attributes = call.machine.options.attributes;
    const auto major = attributes.find(CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR);
    if (major != attributes.end() && major->second < 9) return CUDA_ERROR_INVALID_VALUE;
    if (cluster.x * cluster.y * cluster.z > kMaxClusterSize || cluster.x == 0 ||
        cluster.y == 0 || cluster.z == 0 || config.gridDimX % cluster.x != 0 ||
        config.gridDimY % cluster.y != 0 || config.gridDimZ % cluster.z != 0) {
      return CUDA_ERROR_INVALID_CLUSTER_SIZE;
    }
  }
  return CUDA_SUCCESS;
}

void RunTwin(Machine& machine,
             const EmulatedKernel& twin,
             const std::string& params,
             unsigned num_blocks,
             unsigned num_threads) {
  try {
    twin.run(params.data(), num_blocks, num_threads);
  } catch (const std::exception& error) {
    const Unseen unseen;
    const std::lock_guard lock(machine.mutex);
    machine.violations.push_back(std::string(twin.name) + ": " + error.what());
  }
}

CUresult LaunchKernelEx(const CUlaunchConfig* config,
                        CUfunction function,
                        void** params,
                        void** extra) {
  return RunInContext("LaunchKernelEx", [&](Call& call) {
    if (config == nullptr) return CUDA_ERROR_INVALID_VALUE;
    const Stream* const stream = call.FindStream(config->hStream);
    if (stream == nullptr) return CUDA_ERROR_INVALID_HANDLE;
    const EmulatedKernel* const twin = FindTwin(call, function, stream->device);
    if (twin == nullptr) return CUDA_ERROR_INVALID_HANDLE;
    const unsigned num_blocks = config->gridDimX * config->gridDimY * config->gridDimZ;
    const unsigned num_threads =
        config->blockDimX * config->blockDimY * config->blockDimZ;
    if (num_blocks == 0 || num_threads == 0 || num_threads > kMaxBlockSize ||
        params == nullptr || params[0] == nullptr) {
      return CUDA_ERROR_INVALID_VALUE;
    }
    if (extra != nullptr) return CUDA_ERROR_NOT_SUPPORTED;
    if (const CUresult refused = CheckCluster(call, *config)) return refused;
    Function* const loaded = call.machine.functions.Find(function);
    if (loaded == nullptr || !std::exchange(loaded->is_loaded, true)) {
      call.Load(std::string(twin->name));
    }
    ++call.machine.num_calls[std::string(twin->name)];
    std::string copied(static_cast<const char*>(params[0]), twin->params_bytes);
    Operation operation;
    operation.name = twin->name.data();
    operation.num_processors = 1;
    operation.touches = TouchedBy(twin->name, copied.data());
    operation.run = [machine = &call.machine, twin, copied = std::move(copied),
                     num_blocks, num_threads] {
      RunTwin(*machine, *twin, copied, num_blocks, num_threads);
    };
    return Enqueue(call, config->hStream, std::move(operation));
  });
}

}  // namespace

void FillKernels(Driver& driver) {
  driver.LibraryLoadData = LibraryLoadData;
  driver.LibraryGetKernel = LibraryGetKernel;
  driver.LibraryUnload = LibraryUnload;
  driver.KernelGetFunction = KernelGetFunction;
  driver.FuncLoad = FuncLoad;
  driver.LaunchKernelEx = LaunchKernelEx;
}

}  // namespace jax_ub::emulated
