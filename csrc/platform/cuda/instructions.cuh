// What kernels need and C++ has no words for, in PTX. All of it is declared for any
// compiler: tests compile the kernels for the host too, and define it there
// (tests/csrc/cuda/emulated_kernels.cc).
#pragma once

#include <cstdint>

namespace jax_ub::gpu {

// Acquire and release for the whole system: other devices, and the host. Addresses are
// those of global memory, be it here, a peer's or the host's.
__device__ uint64_t LoadAcquire(uint64_t address);
__device__ uint32_t LoadAcquire(const uint32_t* address);
__device__ void StoreRelease(uint64_t address, uint64_t value);
__device__ void StoreRelease(uint32_t* address, uint32_t value);

// True for the first that claims the word, which was zero. For one device.
__device__ bool Claim(uint64_t address);

// Nanoseconds of a clock that all kernels share.
__device__ uint64_t Now();
__device__ void Pause(uint32_t ns);
// Lanes of a warp wait for each other.
__device__ void SyncWarp();

// Two elements of 16 bits, the first in the low half. Narrowing rounds to nearest even.
__device__ float2 WidenBF16(uint32_t pair);
__device__ float2 WidenF16(uint32_t pair);
__device__ uint32_t NarrowBF16(float2 pair);
__device__ uint32_t NarrowF16(float2 pair);

#ifdef __CUDACC__

__device__ inline uint64_t LoadAcquire(uint64_t address) {
  uint64_t value;
  asm volatile("ld.acquire.sys.global.u64 %0, [%1];"
               : "=l"(value)
               : "l"(address)
               : "memory");
  return value;
}

__device__ inline uint32_t LoadAcquire(const uint32_t* address) {
  uint32_t value;
  asm volatile("ld.acquire.sys.global.u32 %0, [%1];"
               : "=r"(value)
               : "l"(address)
               : "memory");
  return value;
}

__device__ inline void StoreRelease(uint64_t address, uint64_t value) {
  asm volatile("st.release.sys.global.u64 [%0], %1;" ::"l"(address), "l"(value)
               : "memory");
}

__device__ inline void StoreRelease(uint32_t* address, uint32_t value) {
  asm volatile("st.release.sys.global.u32 [%0], %1;" ::"l"(address), "r"(value)
               : "memory");
}

__device__ inline bool Claim(uint64_t address) {
  return atomicCAS(reinterpret_cast<unsigned long long*>(address), 0ull, 1ull) == 0;
}

__device__ inline uint64_t Now() {
  uint64_t ns;
  asm volatile("mov.u64 %0, %globaltimer;" : "=l"(ns));
  return ns;
}

__device__ inline void Pause(uint32_t ns) { __nanosleep(ns); }
__device__ inline void SyncWarp() { __syncwarp(); }

__device__ inline float2 WidenBF16(uint32_t pair) {
  return {__uint_as_float(pair << 16), __uint_as_float(pair & 0xffff0000u)};
}

__device__ inline float2 WidenF16(uint32_t pair) {
  float2 wide;
  asm("{ .reg .b16 low, high;\n\t"
      "mov.b32 {low, high}, %2;\n\t"
      "cvt.f32.f16 %0, low;\n\t"
      "cvt.f32.f16 %1, high; }"
      : "=f"(wide.x), "=f"(wide.y)
      : "r"(pair));
  return wide;
}

__device__ inline uint32_t NarrowBF16(float2 pair) {
  uint32_t narrow;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(narrow) : "f"(pair.y), "f"(pair.x));
  return narrow;
}

__device__ inline uint32_t NarrowF16(float2 pair) {
  uint32_t narrow;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(narrow) : "f"(pair.y), "f"(pair.x));
  return narrow;
}

#endif  // __CUDACC__

}  // namespace jax_ub::gpu
