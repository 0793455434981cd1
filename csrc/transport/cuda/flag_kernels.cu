// The kernels that exchange flags between ranks; see flags.cuh.

#include "platform/cuda/instructions.cuh"
#include "transport/cuda/flag_params.h"
#include "transport/cuda/flags.cuh"

namespace jax_ub::gpu {
namespace {

// Sends one signal per thread: stores `word` in the flag of a peer. If this rank has
// failed, stores `failed` in the peer's `poison` instead.
__device__ void SignalAll(const FlagTargets& signals, uint64_t word, uint64_t failed) {
  if (threadIdx.x >= signals.num_targets) return;
  const FlagTarget& target = signals.targets[threadIdx.x];
  if (failed != 0) {
    StoreRelease(target.poison, failed);
  } else {
    StoreRelease(target.flag, word);
  }
}

// Sends the pending signals of this rank, then announces the call to the peers. This is
// the first part of jax_ub_wait.
__device__ void SignalAndAnnounce(const WaitParams& params, const CallWords& words) {
  SignalAll(params.signals, words.current, words.failed);
  // A failed rank must not announce calls: its epoch does not advance, so it would
  // announce different calls with the same epoch.
  if (threadIdx.x < params.announcements.num_peers && words.failed == 0) {
    StoreRelaxed(params.announcements.words[threadIdx.x], words.current);
  }
}

// Waits until the peers have set the awaited flags, with one thread per flag. This is
// the second part of jax_ub_wait.
__device__ void WaitForFlags(const WaitParams& params, const CallWords& words) {
  if (threadIdx.x >= params.num_flags || words.failed != 0) return;
  WaitFor(params.waiting, params.flags[threadIdx.x],
          params.ahead != 0 ? words.current : words.epoch, words.current);
}

// Ends a call in jax_ub_end. If the rank has not failed, advances the epoch and frees
// this rank's slots for the peers. If the rank has failed, reports the failure to the
// peers. Returns true in thread 0 if the rank has failed.
__device__ bool EndCall(const EndParams& params) {
  // Each thread signals one peer. Another peer may store `poison` when some threads
  // have already loaded it. The peers of these threads then learn of the failure from a
  // later kernel of this rank.
  const uint64_t poison = LoadRelaxed(params.own.poison);
  const CallWords words = LoadCall(params.own, params.tag);
  uint64_t failed = words.failed;
  ErrorRecord what = {};
  what.rank = params.rank;
  if (failed == 0 && poison != 0) {
    ReadPoison(poison, what);
    failed = poison;
  }
  SignalAll(params.freed, words.current, failed);
  SyncWarp();  // every thread with a target has read the epoch
  if (threadIdx.x != 0) return false;
  if (failed == 0) {
    StoreRelease(params.own.epoch, words.current);
    return false;
  }
  what.slot = ErrorRecord::kNoSlot;
  what.chunk = -1;
  what.call = params.call;
  if (words.failed == 0 && Claim(params.own.failed, failed)) {
    Record(params.own, what, ErrorRecord::kPeerFailed);
  }
  return true;
}

// Fills the results of a failed call with NaN. Sets all bits, which is a NaN in every
// dtype.
__device__ void FillNan(const NanFill& nan_fill) {
  for (uint32_t i = 0; i < nan_fill.num_results; ++i) {
    const NanFill::Result& result = nan_fill.results[i];
    // XLA aligns results to at least 16 bytes, so vector stores are the usual case.
    const uint64_t num_vectors = result.data % 16 == 0 ? result.size_bytes / 16 : 0;
    for (uint64_t at = threadIdx.x; at < num_vectors; at += blockDim.x) {
      reinterpret_cast<uint4*>(result.data)[at] = {~0u, ~0u, ~0u, ~0u};
    }
    for (uint64_t at = 16 * num_vectors + threadIdx.x; at < result.size_bytes;
         at += blockDim.x) {
      reinterpret_cast<uint8_t*>(result.data)[at] = 0xff;
    }
  }
}

}  // namespace

extern "C" __global__ void __launch_bounds__(32)
    jax_ub_signal(const __grid_constant__ SignalParams params) {
  const CallWords words = LoadCall(params.own, params.tag);
  SignalAll(params.signals, words.current, words.failed);
}

// The kernel has one block, since all threads must agree on whether the rank has
// failed.
extern "C" __global__ void __launch_bounds__(kEndThreads)
    jax_ub_end(const __grid_constant__ EndParams params) {
  if (SyncBlockAny(EndCall(params))) FillNan(params.nan_fill);
}

extern "C" __global__ void __launch_bounds__(kEndThreads)
    jax_ub_fill_nan(const __grid_constant__ NanFillParams params) {
  if (LoadRelaxed(params.own.failed) != 0) FillNan(params.nan_fill);
}

extern "C" __global__ void __launch_bounds__(32)
    jax_ub_wait(const __grid_constant__ WaitParams params) {
  const CallWords words = LoadCall(params.waiting.own, params.waiting.tag);
  SignalAndAnnounce(params, words);
  SyncWarp();  // all signals are sent before any thread waits
  WaitForFlags(params, words);
}

extern "C" __global__ void __launch_bounds__(32)
    jax_ub_check_partition(const __grid_constant__ PartitionCheckParams params) {
  if (threadIdx.x != 0) return;
  ErrorRecord what = params.what;
  what.partition = *reinterpret_cast<const uint32_t*>(params.partition);
  if (what.partition == params.expected) return;
  Fail(params.own, params.peers, FailedWord(what), what, ErrorRecord::kMisplaced);
}

}  // namespace jax_ub::gpu
