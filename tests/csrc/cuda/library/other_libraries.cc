// What XLA asks libcudart.so.13 and libnvidia-ml.so.1 before it uses a GPU. Declared here:
// their headers need not be there.
#include <cuda.h>

#include <cstdio>

#include "cuda/emulated_driver.h"

extern "C" {

// The kernels of XLA's own files, of which none runs.
void** __cudaRegisterFatBinary(void*) {
  static void* handle;
  return &handle;
}
void __cudaRegisterFatBinaryEnd(void**) {}
void __cudaUnregisterFatBinary(void**) {}
void __cudaRegisterFunction() {}
void __cudaRegisterVar() {}

int cudaRuntimeGetVersion(int* version) {
  return jax_ub::EmulatedDriver().DriverGetVersion(version);
}
int cudaGetDeviceCount(int* count) {
  return jax_ub::EmulatedDriver().DeviceGetCount(count);
}
int cudaGetLastError() { return 0; }
int cudaPeekAtLastError() { return 0; }
const char* cudaGetErrorString(int) { return "an error of the emulated runtime"; }

int nvmlInit_v2() { return 0; }
const char* nvmlErrorString(int) { return "an error of the emulated NVML"; }
int nvmlSystemGetDriverVersion(char* text, unsigned size) {
  std::snprintf(text, size, "580.00");
  return 0;
}

}  // extern "C"
