// PTX instructions and CUDA intrinsics that kernels use. The functions are declared for
// every compiler, because tests also compile the kernels for the host and define the
// functions there (tests/csrc/cuda/emulated_kernels.cc).
#pragma once

#include <cstdint>

namespace jax_ub::gpu {

// Loads with acquire order and stores with release order. Their scope is the system,
// which includes other devices and the host. An address may refer to memory of this
// device or a peer, or to pinned host memory.
__device__ uint64_t LoadAcquire(uint64_t address);
__device__ uint32_t LoadAcquire(const uint32_t* address);
__device__ void StoreRelease(uint64_t address, uint64_t value);
__device__ void StoreRelease(uint32_t* address, uint32_t value);
// Relaxed loads and stores at system scope. They do not order other accesses, so
// several loads can be in flight at a time.
__device__ uint64_t LoadRelaxed(uint64_t address);
__device__ void StoreRelaxed(uint64_t address, uint64_t value);

// Atomically replaces a zero by `value`. Returns whether this thread has replaced it.
// All threads that claim an address must be on the same device.
__device__ bool Claim(uint64_t address, uint64_t value);

// Now returns the time of %globaltimer in nanoseconds, a clock that all kernels of a
// device share. Pause sleeps for about `ns` nanoseconds.
__device__ uint64_t Now();
__device__ void Pause(uint32_t ns);
// Barriers: SyncWarp for the threads of a warp, SyncBlock for the threads of a block.
__device__ void SyncWarp();
__device__ void SyncBlock();
// A barrier for the threads of a block. Returns whether `condition` is true in any of
// them.
__device__ bool SyncBlockAny(bool condition);

// Widen* converts two 16-bit elements to f32. Narrow* converts two f32 to 16-bit
// elements, rounded to nearest even. The first element is in the low half of `pair`.
__device__ float2 WidenBF16(uint32_t pair);
__device__ float2 WidenF16(uint32_t pair);
__device__ uint32_t NarrowBF16(float2 pair);
__device__ uint32_t NarrowF16(float2 pair);

// Selects four of eight bytes: bytes 0 to 3 are those of `low`, and bytes 4 to 7 those
// of `high`. Byte i of the result is the byte with the number in hexadecimal digit i of
// `selector`.
__device__ uint32_t PermuteBytes(uint32_t low, uint32_t high, uint32_t selector);

// Access 16 bytes at a multicast address, which other instructions must not use
// (compute capability 9.0). MulticastSum* adds the elements at this address on all
// devices, in f32, and rounds the sums to the dtype. MulticastStore writes the same
// bytes on all devices.
__device__ uint4 MulticastSumF32(uint64_t address);
__device__ uint4 MulticastSumBF16(uint64_t address);
__device__ uint4 MulticastSumF16(uint64_t address);
__device__ void MulticastStore(uint64_t address, uint4 vector);
// Orders accesses to the same memory through different virtual addresses
// (fence.proxy.alias). Other fences do not order such accesses.
__device__ void FenceAliases();

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

__device__ inline uint64_t LoadRelaxed(uint64_t address) {
  uint64_t value;
  asm volatile("ld.relaxed.sys.global.u64 %0, [%1];"
               : "=l"(value)
               : "l"(address)
               : "memory");
  return value;
}

__device__ inline void StoreRelaxed(uint64_t address, uint64_t value) {
  asm volatile("st.relaxed.sys.global.u64 [%0], %1;" ::"l"(address), "l"(value)
               : "memory");
}

__device__ inline bool Claim(uint64_t address, uint64_t value) {
  return atomicCAS(reinterpret_cast<unsigned long long*>(address), 0ull, value) == 0;
}

__device__ inline uint64_t Now() {
  uint64_t ns;
  asm volatile("mov.u64 %0, %globaltimer;" : "=l"(ns));
  return ns;
}

__device__ inline void Pause(uint32_t ns) { __nanosleep(ns); }
__device__ inline void SyncWarp() { __syncwarp(); }
__device__ inline void SyncBlock() { __syncthreads(); }
__device__ inline bool SyncBlockAny(bool condition) {
  return __syncthreads_or(condition ? 1 : 0) != 0;
}

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

__device__ inline uint32_t PermuteBytes(uint32_t low,
                                        uint32_t high,
                                        uint32_t selector) {
  return __byte_perm(low, high, selector);
}

__device__ inline uint4 MulticastSumF32(uint64_t address) {
  float4 sum;
  asm volatile(
      "multimem.ld_reduce.relaxed.sys.global.add.v4.f32 {%0, %1, %2, %3}, [%4];"
      : "=f"(sum.x), "=f"(sum.y), "=f"(sum.z), "=f"(sum.w)
      : "l"(address)
      : "memory");
  return {__float_as_uint(sum.x), __float_as_uint(sum.y), __float_as_uint(sum.z),
          __float_as_uint(sum.w)};
}

__device__ inline uint4 MulticastSumBF16(uint64_t address) {
  uint4 sum;
  asm volatile(
      "multimem.ld_reduce.relaxed.sys.global.add.acc::f32.v4.bf16x2 "
      "{%0, %1, %2, %3}, [%4];"
      : "=r"(sum.x), "=r"(sum.y), "=r"(sum.z), "=r"(sum.w)
      : "l"(address)
      : "memory");
  return sum;
}

__device__ inline uint4 MulticastSumF16(uint64_t address) {
  uint4 sum;
  asm volatile(
      "multimem.ld_reduce.relaxed.sys.global.add.acc::f32.v4.f16x2 "
      "{%0, %1, %2, %3}, [%4];"
      : "=r"(sum.x), "=r"(sum.y), "=r"(sum.z), "=r"(sum.w)
      : "l"(address)
      : "memory");
  return sum;
}

__device__ inline void MulticastStore(uint64_t address, uint4 vector) {
  asm volatile(
      "multimem.st.relaxed.sys.global.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(address),
      "f"(__uint_as_float(vector.x)), "f"(__uint_as_float(vector.y)),
      "f"(__uint_as_float(vector.z)), "f"(__uint_as_float(vector.w))
      : "memory");
}

__device__ inline void FenceAliases() {
  asm volatile("fence.proxy.alias;" ::: "memory");
}

#endif  // __CUDACC__

}  // namespace jax_ub::gpu
