// What the kernel that sums by multicast is given: read by the kernel, its launcher and its
// host twin (tests/csrc/cuda/emulated_kernels.h). Addresses are CUdeviceptr.
#pragma once

#include <cstdint>

#include "gemm/dtype.h"
#include "transport/cuda/flag_params.h"

namespace jax_ub {

inline constexpr int kMaxMulticastAddends = 2;  // bias and residual

// Contiguous elements of this device's memory: element i is data[i % period].
struct MulticastAddend {
  uint64_t data;
  int64_t period;
  DType dtype;
};

// jax_ub_multicast_sum: for the vectors [begin, end) of 16 bytes, the sum of what all
// devices have at `data`, then the addends in f32, stored at all devices. The last vector
// may reach beyond the elements: nothing is added there. Nothing is stored by a rank that
// has failed.
struct MulticastSumParams {
  RankWords own;
  uint64_t data;  // a multicast address, a multiple of 16
  int64_t begin;
  int64_t end;
  int64_t num_elements;  // from `data` on
  DType dtype;
  uint32_t num_addends;
  MulticastAddend addends[kMaxMulticastAddends];
};

inline constexpr char kMulticastSumKernel[] = "jax_ub_multicast_sum";
inline constexpr int64_t kMulticastBytes = 16;  // of a vector
inline constexpr int kMulticastThreads = 512;   // per block

}  // namespace jax_ub
