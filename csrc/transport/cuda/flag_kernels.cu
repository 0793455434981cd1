// The kernels that exchange flags between ranks, without the host.
//
// Memory order: the earlier work of a stream, by kernels and copy engines, happens
// before the store of a signal, which releases it at system scope. The load of a wait
// acquires it for the later work of the waiting stream. A wait checks its flag first,
// so a wait that is already satisfied accesses neither host memory nor the clock.

#include "platform/cuda/instructions.cuh"
#include "transport/cuda/flag_params.h"

namespace jax_ub::gpu {
namespace {

constexpr uint32_t kFirstPauseNs = 32;
constexpr uint32_t kLastPauseNs = 512;
// A wait checks the host's poison and the peer's announced call only every 16
// iterations: host memory has a latency of about a microsecond, and mismatched calls
// are rare.
constexpr uint32_t kLooksPerLongLook = 16;

// Returns the word of the call after the one that `epoch` ended.
__device__ uint64_t NextCall(uint64_t epoch, uint32_t tag) {
  return (epoch | kTagMask) + 1 + tag;
}

// Returns whether a word has the expected epoch, but the tag of a different call.
__device__ bool IsOtherCall(uint64_t word, uint64_t expected) {
  return word != expected && (word ^ expected) <= kTagMask;
}

__device__ uint64_t FailedWord(const ErrorRecord& what) {
  return (what.rank + 1) | uint64_t{what.tag} << kFailedRankBits |
         uint64_t{what.other_tag} << (kFailedRankBits + kTagBits);
}

// Decodes the word that a failed peer has written to this rank's `poison`.
__device__ void ReadPoison(uint64_t poison, ErrorRecord& what) {
  what.peer = static_cast<uint32_t>(poison & kFailedRankMask) - 1;
  what.tag = static_cast<uint32_t>(poison >> kFailedRankBits & kTagMask);
  what.other_tag = static_cast<uint32_t>(poison >> (kFailedRankBits + kTagBits));
}

// Records the first failure of a rank; later failures have no effect. `code` is stored
// last.
__device__ void Fail(const RankWords& own, const ErrorRecord& what, uint32_t code) {
  if (!Claim(own.failed, FailedWord(what))) return;
  auto* record = reinterpret_cast<ErrorRecord*>(own.error);
  record->rank = what.rank;
  record->peer = what.peer;
  record->slot = what.slot;
  record->chunk = what.chunk;
  record->call = what.call;
  record->waited_ns = what.waited_ns;
  record->partition = what.partition;
  record->tag = what.tag;
  record->other_tag = what.other_tag;
  StoreRelease(&record->code, code);
}

// Reports the failure to the peers before it takes effect on this rank.
__device__ void ReportAndFail(const RankWords& own,
                              const PeerWords& peers,
                              const ErrorRecord& what,
                              uint32_t code) {
#ifdef __CUDACC__
#pragma unroll 1  // unrolled, the loop would use most of the wait kernel's registers
#endif
  for (uint32_t i = 0; i < peers.num_peers; ++i) {
    StoreRelease(peers.words[i], FailedWord(what));
  }
  Fail(own, what, code);
}

// Each lane writes one target: its flag, or its `poison` if `failed` is not 0.
__device__ void SignalAll(const SignalParams& params, uint64_t word, uint64_t failed) {
  if (threadIdx.x >= params.num_targets) return;
  const FlagTarget& target = params.targets[threadIdx.x];
  if (failed != 0) {
    StoreRelease(target.poison, failed);
  } else {
    StoreRelease(target.flag, word);
  }
}

}  // namespace

extern "C" __global__ void __launch_bounds__(32)
    jax_ub_signal(const __grid_constant__ SignalParams params) {
  SignalAll(params, NextCall(LoadAcquire(params.own.epoch), params.tag),
            LoadAcquire(params.own.failed));
}

extern "C" __global__ void __launch_bounds__(32)
    jax_ub_end(const __grid_constant__ SignalParams params) {
  const uint64_t word = NextCall(LoadAcquire(params.own.epoch), params.tag);
  // A peer may write `poison` between the loads of two lanes. Then only some targets
  // get the failure here; a later kernel of this rank writes it to the others.
  const uint64_t poison = LoadAcquire(params.own.poison);
  uint64_t failed = LoadAcquire(params.own.failed);
  ErrorRecord what = {};
  what.rank = params.rank;
  if (failed == 0 && poison != 0) {
    ReadPoison(poison, what);
    failed = FailedWord(what);
  }
  SignalAll(params, word, failed);
  SyncWarp();  // every lane has read the epoch
  if (threadIdx.x != 0) return;
  if (failed == 0) return StoreRelease(params.own.epoch, word);
  if (poison == 0) return;
  what.slot = ErrorRecord::kNoSlot;
  what.chunk = -1;
  what.call = params.call;
  Fail(params.own, what, ErrorRecord::kPeerFailed);
}

extern "C" __global__ void __launch_bounds__(32)
    jax_ub_wait(const __grid_constant__ WaitParams params) {
  const RankWords& own = params.own;
  const uint64_t epoch = LoadAcquire(own.epoch);
  const uint64_t current = NextCall(epoch, params.tag);
  // A failed rank must not announce calls: its epoch no longer advances, so peers would
  // see two different calls with the same epoch.
  if (threadIdx.x < params.signatures.num_peers && LoadAcquire(own.failed) == 0) {
    StoreRelaxed(params.signatures.words[threadIdx.x], current);
  }
  if (threadIdx.x != 0) return;
  const uint64_t wanted = params.ahead != 0 ? current : epoch;
  const uint64_t began = Now();
  uint32_t pause = kFirstPauseNs;
  for (uint32_t look = 0;; ++look) {
    if (LoadAcquire(params.flag) == wanted) return;
    if (LoadAcquire(own.failed) != 0) return;
    const uint64_t waited_ns = Now() - began;
    const bool is_late = waited_ns >= params.timeout_ns;
    const uint64_t poison = LoadAcquire(own.poison);
    uint32_t code = ErrorRecord::kNone;
    uint64_t announced = current;
    if (poison != 0) {
      code = ErrorRecord::kPeerFailed;
    } else if (is_late || look % kLooksPerLongLook == 0) {
      announced = LoadAcquire(params.announced);
      const auto* record = reinterpret_cast<const ErrorRecord*>(own.error);
      if (IsOtherCall(announced, current)) {
        code = ErrorRecord::kOtherCall;
      } else if (is_late) {
        code = ErrorRecord::kDeadline;
      } else if (LoadAcquire(&record->poisoned) != 0) {
        code = ErrorRecord::kPoisoned;
      }
    }
    if (code != ErrorRecord::kNone) {
      ErrorRecord what = params.what;
      what.waited_ns = waited_ns;
      if (code == ErrorRecord::kPeerFailed) ReadPoison(poison, what);
      if (code == ErrorRecord::kOtherCall) {
        what.tag = params.tag;
        what.other_tag = static_cast<uint32_t>(announced & kTagMask);
      }
      return ReportAndFail(own, params.peers, what, code);
    }
    Pause(pause);
    if (pause < kLastPauseNs) pause *= 2;
  }
}

extern "C" __global__ void __launch_bounds__(32)
    jax_ub_check_partition(const __grid_constant__ PartitionCheckParams params) {
  if (threadIdx.x != 0) return;
  ErrorRecord what = params.what;
  what.partition = *reinterpret_cast<const uint32_t*>(params.partition);
  if (what.partition == params.expected) return;
  ReportAndFail(params.own, params.peers, what, ErrorRecord::kMisplaced);
}

extern "C" __global__ void __launch_bounds__(256)
    jax_ub_fill_nan(const __grid_constant__ NanFillParams params) {
  if (LoadAcquire(params.own.failed) == 0) return;
  const uint64_t first = blockIdx.x * uint64_t{blockDim.x} + threadIdx.x;
  const uint64_t stride = gridDim.x * uint64_t{blockDim.x};
  for (uint32_t i = 0; i < params.num_results; ++i) {
    const NanFillParams::Result& result = params.results[i];
    // XLA aligns results to at least 16 bytes.
    const uint64_t num_vectors = result.data % 16 == 0 ? result.size_bytes / 16 : 0;
    for (uint64_t at = first; at < num_vectors; at += stride) {
      reinterpret_cast<uint4*>(result.data)[at] = {~0u, ~0u, ~0u, ~0u};
    }
    for (uint64_t at = 16 * num_vectors + first; at < result.size_bytes; at += stride) {
      reinterpret_cast<uint8_t*>(result.data)[at] = 0xff;
    }
  }
}

}  // namespace jax_ub::gpu
