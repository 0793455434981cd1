#include <atomic>
#include <mutex>
#include <utility>

#include "ffi/cuda/handlers.h"
#include "platform/cuda/driver.h"
#include "platform/deadline.h"

namespace jax_ub {

namespace {

// The state of the process. It is global, because handlers are plain functions. It is
// never destroyed, because the CUDA driver may shut down before the destructors run.
std::mutex creation;  // guards the variables below, except `engine`
std::vector<std::string> library_paths;
double timeout_of_waits_s = kDefaultTimeoutS;
bool wants_nvls = false;
const CublasLt* library = nullptr;
CudaEngine* own = nullptr;

std::atomic<CudaEngine*> engine{nullptr};

const CublasLt& LoadedLibrary() {
  if (library == nullptr) library = new CublasLt(LoadCublasLt(library_paths));
  return *library;
}

}  // namespace

CudaEngine& ProcessCudaEngine() {
  CudaEngine* found = engine.load(std::memory_order_acquire);
  if (found != nullptr) return *found;
  std::lock_guard lock(creation);
  if (own == nullptr) {
    const Driver& driver = SystemDriver();
    own = new CudaEngine(driver, LoadedLibrary(), timeout_of_waits_s);
    own->set_nvls(wants_nvls);
  }
  engine.store(own, std::memory_order_release);
  return *own;
}

const CublasLt& ProcessCublasLt() {
  std::lock_guard lock(creation);
  return LoadedLibrary();
}

void SetLibraryPaths(std::vector<std::string> directories) {
  std::lock_guard lock(creation);
  library_paths = std::move(directories);
}

void SetCudaTimeout(double timeout_s) {
  std::lock_guard lock(creation);
  timeout_of_waits_s = timeout_s;
  if (own != nullptr) own->set_timeout_s(timeout_s);
}

void SetCudaNvls(bool nvls) {
  std::lock_guard lock(creation);
  wants_nvls = nvls;
}

bool CudaNvls() {
  std::lock_guard lock(creation);
  return wants_nvls;
}

void ReplaceCudaEngine(CudaEngine* replacement) {
  engine.store(replacement, std::memory_order_release);
}

}  // namespace jax_ub
