#include "gemm/cuda/cublaslt.h"

#include <dlfcn.h>

#include <array>
#include <stdexcept>
#include <string>

#include "platform/error.h"

namespace jax_ub {

namespace {

constexpr std::array kNames = {"libcublasLt.so.13", "libcublasLt.so.12"};
constexpr size_t kOldestMajor = 12;
constexpr size_t kNewestMajor = 13;

template <typename Function>
void Read(const CublasLt& library,
          const std::function<void*(const char*)>& find,
          const char* name,
          Function*& function) {
  function = reinterpret_cast<Function*>(find(name));
  if (function == nullptr) {
    throw UnsupportedError(library.path + " has no " + name +
                           ": install nvidia-cublas 13, or nvidia-cublas-cu12");
  }
}

// Returns the path of a loaded library, or `name` if it is unknown.
std::string PathOf(void* library, const char* name) {
  Dl_info info = {};
  void* function = dlsym(library, "cublasLtGetVersion");
  if (function == nullptr || dladdr(function, &info) == 0) return name;
  return info.dli_fname;
}

}  // namespace

lt::DataType DataTypeOf(DType dtype) {
  switch (dtype) {
    case DType::kF32:
      return lt::DataType::kF32;
    case DType::kBF16:
      return lt::DataType::kBF16;
    case DType::kF16:
      return lt::DataType::kF16;
    case DType::kE4M3:
      return lt::DataType::kE4M3;
    case DType::kE5M2:
      return lt::DataType::kE5M2;
    case DType::kE8M0:
      break;
  }
  throw std::invalid_argument("cuBLASLt multiplies no matrices of " +
                              std::string(InfoOf(dtype).name));
}

CublasLt ReadCublasLt(const std::string& path,
                      const std::function<void*(const char*)>& find) {
  CublasLt lib;
  lib.path = path;
  Read(lib, find, "cublasLtGetVersion", lib.GetVersion);
  lib.version = lib.GetVersion();
  const size_t major = lib.version / 10000;
  if (major < kOldestMajor || major > kNewestMajor) {
    throw UnsupportedError(path + " is cuBLASLt version " +
                           std::to_string(lib.version) + ", jax_ub needs " +
                           std::to_string(kOldestMajor) + " or " +
                           std::to_string(kNewestMajor));
  }
  Read(lib, find, "cublasLtGetStatusName", lib.GetStatusName);
  Read(lib, find, "cublasLtCreate", lib.Create);
  Read(lib, find, "cublasLtDestroy", lib.Destroy);
  Read(lib, find, "cublasLtMatmulDescCreate", lib.MatmulDescCreate);
  Read(lib, find, "cublasLtMatmulDescDestroy", lib.MatmulDescDestroy);
  Read(lib, find, "cublasLtMatmulDescSetAttribute", lib.MatmulDescSetAttribute);
  Read(lib, find, "cublasLtMatrixLayoutCreate", lib.MatrixLayoutCreate);
  Read(lib, find, "cublasLtMatrixLayoutDestroy", lib.MatrixLayoutDestroy);
  Read(lib, find, "cublasLtMatrixLayoutSetAttribute", lib.MatrixLayoutSetAttribute);
  Read(lib, find, "cublasLtMatmulPreferenceCreate", lib.MatmulPreferenceCreate);
  Read(lib, find, "cublasLtMatmulPreferenceDestroy", lib.MatmulPreferenceDestroy);
  Read(lib, find, "cublasLtMatmulPreferenceSetAttribute",
       lib.MatmulPreferenceSetAttribute);
  Read(lib, find, "cublasLtMatmulAlgoGetHeuristic", lib.MatmulAlgoGetHeuristic);
  Read(lib, find, "cublasLtMatmul", lib.Matmul);
  return lib;
}

CublasLt LoadCublasLt(std::span<const std::string> directories) {
  std::string tried;
  const auto load = [&](const std::string& name, int flags) -> void* {
    void* library = dlopen(name.c_str(), RTLD_NOW | RTLD_LOCAL | flags);
    if (library == nullptr && flags == 0) {
      const char* reason = dlerror();
      tried += "\n  " + (reason == nullptr ? name : std::string(reason));
    }
    return library;
  };
  const auto read = [](void* library, const char* name) {
    return ReadCublasLt(PathOf(library, name), [library](const char* function) {
      return dlsym(library, function);
    });
  };
  for (const char* name : kNames) {
    if (void* library = load(name, RTLD_NOLOAD)) return read(library, name);
  }
  for (const char* name : kNames) {
    if (void* library = load(name, 0)) return read(library, name);
  }
  for (const std::string& directory : directories) {
    for (const char* name : kNames) {
      if (void* library = load(directory + "/" + name, 0)) return read(library, name);
    }
  }
  throw UnsupportedError(
      "no libcublasLt.so.13 or libcublasLt.so.12 (pip install nvidia-cublas): tried" +
      tried);
}

void Check(const CublasLt& library, lt::Status status, const char* what) {
  if (status == lt::Status::kSuccess) return;
  throw SystemError(std::string(what) + ": " + library.GetStatusName(status));
}

}  // namespace jax_ub
