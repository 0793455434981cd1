#include "cuda/emulated_driver.h"

#include "cuda/emulated_machine.h"

namespace jax_ub {

const Driver& EmulatedDriver() {
  static const Driver driver = [] {
    Driver filled{};
    emulated::FillDevices(filled);
    emulated::FillStreams(filled);
    emulated::FillMemory(filled);
    emulated::FillCopies(filled);
    emulated::FillKernels(filled);
    emulated::FillGraphs(filled);
    emulated::FillVirtualMemory(filled);
    emulated::FillIpc(filled);
    emulated::FillMulticast(filled);
    return filled;
  }();
  return driver;
}

}  // namespace jax_ub
