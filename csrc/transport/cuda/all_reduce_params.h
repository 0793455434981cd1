// The parameters of the kernel that all-reduces few rows in one exchange. Included by
// the kernel, its launcher and its emulation on the host
// (tests/csrc/cuda/emulated_kernels.h). Addresses are CUdeviceptr.
#pragma once

#include <cstdint>

#include "gemm/dtype.h"
#include "reduce/cuda/sum_params.h"
#include "transport/cuda/flag_params.h"

namespace jax_ub {

// The addresses through which a rank exchanges partial sums with one peer.
//
// Each thread block has separate flags. `signal` and `arrived` are the flags of block
// 0. The flags of block b are b * num_peers * kFlagLineBytes bytes after the flags of
// block 0.
struct AllReducePeer {
  uint64_t announcement;  // the peer's word in which this rank announces its calls
  uint64_t to;            // the peer's slot that this rank fills
  uint64_t signal;        // the peer's flag of that slot, for block 0
  AwaitedFlag freed;      // set by the peer when its slots are free
  uint64_t from;          // this rank's slot that the peer fills
  AwaitedFlag arrived;    // that slot's flag, for block 0
};

// The parameters of jax_ub_all_reduce, which computes, with P = number of ranks,
//
//   out[i] = round(partial of rank 0 [i] + ... + partial of rank P - 1 [i] +
//   addends[i])
//
// It adds in f32 and rounds once. Each thread block computes a range of elements, which
// is the same on every rank. It waits until the peers' slots are free, pushes its range
// of this rank's partial sums into them, signals, waits for the same block of every
// peer, and adds. No block waits for another block of its rank.
//
// Waits fail for the same reasons as in jax_ub_wait. A block whose first wait fails
// neither pushes nor signals; jax_ub_end then fills the result with NaN.
struct AllReduceParams {
  WaitingCall waiting;
  uint32_t num_peers;
  uint32_t is_aligned;  // 1: the addresses of all partial sums are multiples of 16
  DType dtype;          // of the partial sums
  DType out_dtype;      // f32, bf16 or f16
  uint32_t num_addends;
  int64_t num_elements;
  uint64_t partial;  // of this rank
  uint64_t out;
  SumAddend addends[kMaxSumAddends];
  AllReducePeer peers[kMaxRanks - 1];  // in rank order, without this rank
};

inline constexpr char kAllReduceKernel[] = "jax_ub_all_reduce";
inline constexpr int kAllReduceThreads = 512;   // per block
inline constexpr int kMaxAllReduceBlocks = 32;  // all of them run at the same time
// The range of elements of each block begins at a multiple of this number, so that
// 16-byte loads are aligned for every dtype.
inline constexpr int64_t kAllReduceVector = 8;

}  // namespace jax_ub
