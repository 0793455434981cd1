// Sums vectors over the memory of all devices with the NVLink switch. For each vector
// of its part, a rank loads the sum over all devices with one instruction, and stores
// the sum on all devices with one instruction.
//
// The GEMMs that wrote the partial sums and the copies that read the results use
// ordinary addresses of the same memory. Flags order these accesses before and after
// the kernel. The two fences of the kernel make this order also hold between ordinary
// and multicast addresses.

#include "platform/cuda/instructions.cuh"
#include "transport/cuda/multicast_params.h"

namespace jax_ub::gpu {
namespace {

// Number of independent loads that a thread issues before it uses their results. This
// hides the latency of the NVLink switch, which is about a microsecond.
constexpr int kInFlight = 4;
// Number of 32-bit words in a vector of 16 bytes. A word is one f32 element or a pair
// of 16-bit elements.
constexpr int kPairs = 4;

template <DType kDType>
__device__ uint4 LoadSum(uint64_t address) {
  if constexpr (kDType == DType::kF32) return MulticastSumF32(address);
  return kDType == DType::kBF16 ? MulticastSumBF16(address) : MulticastSumF16(address);
}

__device__ float Load(const SumAddend& addend, int64_t element) {
  const int64_t at = element % addend.period;
  if (addend.dtype == DType::kF32) {
    return reinterpret_cast<const float*>(addend.data)[at];
  }
  const uint32_t bits = reinterpret_cast<const uint16_t*>(addend.data)[at];
  return addend.dtype == DType::kBF16 ? WidenBF16(bits).x : WidenF16(bits).x;
}

// Returns `sum` plus the addends (such as a bias) of the element with index `element`,
// in order. Elements from index num_elements on have no addends.
__device__ float Added(const MulticastSumParams& params, int64_t element, float sum) {
  if (element >= params.num_elements) return sum;
  for (uint32_t i = 0; i < params.num_addends; ++i) {
    sum += Load(params.addends[i], element);
  }
  return sum;
}

template <DType kDType>
__device__ uint4 Added(const MulticastSumParams& params, int64_t vector, uint4 sum) {
  if (params.num_addends == 0) return sum;
  uint32_t words[kPairs] = {sum.x, sum.y, sum.z, sum.w};
  for (int i = 0; i < kPairs; ++i) {
    if constexpr (kDType == DType::kF32) {
      float one;
      memcpy(&one, &words[i], sizeof(one));
      one = Added(params, kPairs * vector + i, one);
      memcpy(&words[i], &one, sizeof(one));
    } else {
      float2 pair = kDType == DType::kBF16 ? WidenBF16(words[i]) : WidenF16(words[i]);
      const int64_t element = 2 * (kPairs * vector + i);
      pair.x = Added(params, element, pair.x);
      pair.y = Added(params, element + 1, pair.y);
      words[i] = kDType == DType::kBF16 ? NarrowBF16(pair) : NarrowF16(pair);
    }
  }
  return {words[0], words[1], words[2], words[3]};
}

template <DType kDType>
__device__ void SumShare(const MulticastSumParams& params,
                         int64_t first,
                         int64_t step) {
  const auto address = [&](int64_t vector) {
    return params.data + static_cast<uint64_t>(vector * kMulticastBytes);
  };
  int64_t at = params.begin + first;
  for (; at + (kInFlight - 1) * step < params.end; at += kInFlight * step) {
    uint4 sums[kInFlight];
    for (int v = 0; v < kInFlight; ++v) {
      sums[v] = LoadSum<kDType>(address(at + v * step));
    }
    for (int v = 0; v < kInFlight; ++v) {
      MulticastStore(address(at + v * step),
                     Added<kDType>(params, at + v * step, sums[v]));
    }
  }
  for (; at < params.end; at += step) {
    MulticastStore(address(at),
                   Added<kDType>(params, at, LoadSum<kDType>(address(at))));
  }
}

}  // namespace

extern "C" __global__ void __launch_bounds__(kMulticastThreads, 2)
    jax_ub_multicast_sum(const __grid_constant__ MulticastSumParams params) {
  if (LoadAcquire(params.own.failed) != 0) return;
  FenceAliases();
  const int64_t first = blockIdx.x * int64_t{blockDim.x} + threadIdx.x;
  const int64_t step = gridDim.x * int64_t{blockDim.x};
  if (params.dtype == DType::kF32) {
    SumShare<DType::kF32>(params, first, step);
  } else if (params.dtype == DType::kBF16) {
    SumShare<DType::kBF16>(params, first, step);
  } else {
    SumShare<DType::kF16>(params, first, step);
  }
  FenceAliases();
}

}  // namespace jax_ub::gpu
