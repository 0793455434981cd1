// Tests the table of driver functions: how it is filled, and the errors if it cannot
// be.
#include "platform/cuda/driver.h"

#include <cstring>
#include <iterator>
#include <map>
#include <set>
#include <string>

#include "check.h"

namespace jax_ub {
namespace {

// A fake driver library, with its version and the functions that it lacks.
struct FakeLibrary {
  int version = 13000;
  std::set<std::string> missing = {};
  std::map<std::string, int> asked = {};  // the version that each symbol was asked for
};
FakeLibrary library;

CUresult GetVersion(int* version) {
  *version = library.version;
  return CUDA_SUCCESS;
}

// Returns an address that is unique for each symbol and encodes its name.
CUresult GetAddress(const char* name,
                    void** address,
                    int version,
                    cuuint64_t,
                    CUdriverProcAddressQueryResult*) {
  const auto entry = library.asked.emplace(name, version).first;
  if (library.missing.contains(name)) {
    *address = nullptr;
    return CUDA_ERROR_NOT_FOUND;
  }
  *address = const_cast<char*>(entry->first.data());
  return CUDA_SUCCESS;
}

void* FindSymbol(const char* name) {
  if (library.missing.contains(name)) return nullptr;
  if (name == std::string("cuDriverGetVersion")) {
    return reinterpret_cast<void*>(&GetVersion);
  }
  if (name == std::string("cuGetProcAddress_v2")) {
    return reinterpret_cast<void*>(&GetAddress);
  }
  return nullptr;
}

template <typename Function>
std::string NameAt(Function* function) {
  return function == nullptr ? "" : reinterpret_cast<const char*>(function);
}

void Load() { static_cast<void>(LoadDriver(&FindSymbol)); }

TEST(EveryMemberIsTheFunctionOfItsName) {
  library = {};
  const Driver driver = LoadDriver(&FindSymbol);
  CHECK_EQ(NameAt(driver.Init), "cuInit");
  CHECK_EQ(NameAt(driver.GraphInstantiate), "cuGraphInstantiateWithFlags");
  CHECK_EQ(NameAt(driver.IpcCloseMemHandle), "cuIpcCloseMemHandle");
  CHECK_EQ(NameAt(driver.FuncLoad), "cuFuncLoad");
  const void* members[sizeof(Driver) / sizeof(void*)];
  std::memcpy(members, &driver, sizeof(driver));
  std::set<const void*> distinct(std::begin(members), std::end(members));
  CHECK_EQ(distinct.size(), std::size(members));
  CHECK(!distinct.contains(nullptr));
}

TEST(NoFunctionIsAskedForInAVersionThatTheOldestDriverLacks) {
  library = {};
  Load();
  for (const auto& [name, version] : library.asked) {
    const bool is_optional = name == "cuFuncLoad" || name.starts_with("cuMulticast");
    CHECK(version <= 12000 || is_optional);
  }
}

TEST(AnOlderDriverIsRefusedByItsVersion) {
  library = {.version = 11080};
  CHECK_THROWS(Load(),
               "the NVIDIA driver is for CUDA 11.8, and jax_ub needs one for CUDA 12.0 "
               "or newer: update it");
  library = {.version = 11040, .missing = {"cuGetProcAddress_v2"}};
  CHECK_THROWS(Load(), "is for CUDA 11.4,");
}

TEST(AMissingFunctionIsNamed) {
  library = {.version = 12040, .missing = {"cuLaunchKernelEx"}};
  CHECK_THROWS(Load(),
               "the NVIDIA driver (CUDA 12.4) has no cuLaunchKernelEx of CUDA 11.6");
  library = {.missing = {"cuDriverGetVersion"}};
  CHECK_THROWS(Load(), "libcuda.so.1 does not say its version: is it a driver?");
}

TEST(ADriverWithoutWhatIsOptionalIsTaken) {
  library = {.version = 12000, .missing = {"cuFuncLoad", "cuMulticastCreate"}};
  const Driver driver = LoadDriver(&FindSymbol);
  CHECK(driver.FuncLoad == nullptr);
  CHECK(driver.MulticastCreate == nullptr);
  CHECK(driver.KernelGetFunction != nullptr);
}

}  // namespace
}  // namespace jax_ub

CHECK_MAIN()
