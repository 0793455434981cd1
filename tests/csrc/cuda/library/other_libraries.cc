// Functions of libcudart.so.13 and libnvidia-ml.so.1 that XLA calls before it uses a
// GPU. They are declared here because the headers may be missing.
#include <cuda.h>

#include <cstdio>

#include "cuda/emulated_driver.h"

extern "C" {

// Registers the kernels in XLA's own files, none of which runs.
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
