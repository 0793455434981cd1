// The parameters of the kernel that sums with multicast. Included by the kernel, its
// launcher and its emulation on the host (tests/csrc/cuda/emulated_kernels.h).
// Addresses are CUdeviceptr.
#pragma once

#include <cstdint>

#include "gemm/dtype.h"
#include "reduce/cuda/sum_params.h"
#include "transport/cuda/flag_params.h"

namespace jax_ub {

// The parameters of the kernel jax_ub_multicast_sum.
//
// The kernel sums each of the 16-byte vectors [begin, end) at `data` over all devices,
// adds the addends in f32, and stores the result on all devices. Bytes after element
// num_elements get no addends. A rank that has failed stores nothing.
struct MulticastSumParams {
  RankWords own;
  uint64_t data;         // a multicast address, a multiple of 16
  int64_t begin;         // the first vector of this rank
  int64_t end;           // the vector after the last one of this rank
  int64_t num_elements;  // of all ranks' vectors, counted from `data`
  DType dtype;
  uint32_t num_addends;
  SumAddend addends[kMaxSumAddends];
};

inline constexpr char kMulticastSumKernel[] = "jax_ub_multicast_sum";
inline constexpr int64_t kMulticastBytes = 16;  // the size of a vector
inline constexpr int kMulticastThreads = 512;   // per block

}  // namespace jax_ub
