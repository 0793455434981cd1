// The kernels that exchange flags between ranks, without the host.
//
// Memory order: the earlier work of a stream, by kernels and copy engines, happens
// before the store of a signal, which releases it at system scope. The load of a wait
// acquires it for the later work of the waiting stream. A wait polls its flag, and
// checks everything else rarely.

#include "platform/cuda/instructions.cuh"
#include "transport/cuda/flag_params.h"

namespace jax_ub::gpu {
namespace {

constexpr uint32_t kFirstPauseNs = 32;
constexpr uint32_t kLastPauseNs = 512;
// A wait checks for failures and for a different call only every 16 iterations: host
// memory has a latency of about a microsecond, and these are rare.
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

// Fills the error record; `code` is stored last.
__device__ void Record(const RankWords& own, const ErrorRecord& what, uint32_t code) {
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

// Records the first failure of a rank and reports it to the peers; later failures have
// no effect.
__device__ void Fail(const RankWords& own,
                     const PeerWords& poisons,
                     const ErrorRecord& what,
                     uint32_t code) {
  if (!Claim(own.failed, FailedWord(what))) return;
#ifdef __CUDACC__
#pragma unroll 1  // unrolled, the loop would use most of the wait kernel's registers
#endif
  for (uint32_t i = 0; i < poisons.num_peers; ++i) {
    StoreRelease(poisons.words[i], FailedWord(what));
  }
  Record(own, what, code);
}

// Each thread writes one target: its flag, or its `poison` if `failed` is not 0.
__device__ void SignalAll(const FlagTargets& signals, uint64_t word, uint64_t failed) {
  if (threadIdx.x >= signals.num_targets) return;
  const FlagTarget& target = signals.targets[threadIdx.x];
  if (failed != 0) {
    StoreRelease(target.poison, failed);
  } else {
    StoreRelease(target.flag, word);
  }
}

// The first part of jax_ub_wait.
__device__ void SignalAndAnnounce(const WaitParams& params) {
  const RankWords& own = params.waiting.own;
  const uint64_t word = NextCall(LoadAcquire(own.epoch), params.waiting.tag);
  const uint64_t failed = LoadAcquire(own.failed);
  SignalAll(params.signals, word, failed);
  // A failed rank must not announce calls: its epoch no longer advances, so peers would
  // see two different calls with the same epoch.
  if (threadIdx.x < params.announcements.num_peers && failed == 0) {
    StoreRelaxed(params.announcements.words[threadIdx.x], word);
  }
}

// Waits until *awaited.flag is `wanted`, or the rank has failed. `current` is the word
// of this call.
__device__ void WaitFor(const WaitingCall& waiting,
                        const AwaitedFlag& awaited,
                        uint64_t wanted,
                        uint64_t current) {
  const RankWords& own = waiting.own;
  const uint64_t began = Now();
  uint32_t pause = kFirstPauseNs;
  for (uint32_t look = 1;; ++look) {
    if (LoadAcquire(awaited.flag) == wanted) return;
    const uint64_t waited_ns = Now() - began;
    const bool is_late = waited_ns >= waiting.timeout_ns;
    if (is_late || look % kLooksPerLongLook == 0) {
      if (LoadAcquire(own.failed) != 0) return;
      const uint64_t poison = LoadAcquire(own.poison);
      const uint64_t announced = LoadAcquire(awaited.announced);
      const auto* record = reinterpret_cast<const ErrorRecord*>(own.error);
      const uint32_t code = poison != 0                       ? ErrorRecord::kPeerFailed
                            : IsOtherCall(announced, current) ? ErrorRecord::kOtherCall
                            : is_late                         ? ErrorRecord::kDeadline
                            : LoadAcquire(&record->poisoned) != 0
                                ? ErrorRecord::kPoisoned
                                : ErrorRecord::kNone;
      if (code != ErrorRecord::kNone) {
        ErrorRecord what = {};
        what.rank = waiting.rank;
        what.peer = awaited.peer;
        what.slot = awaited.slot;
        what.chunk = awaited.chunk;
        what.call = waiting.call;
        what.waited_ns = waited_ns;
        if (code == ErrorRecord::kPeerFailed) ReadPoison(poison, what);
        if (code == ErrorRecord::kOtherCall) {
          what.tag = waiting.tag;
          what.other_tag = static_cast<uint32_t>(announced & kTagMask);
        }
        return Fail(own, waiting.poisons, what, code);
      }
    }
    Pause(pause);
    if (pause < kLastPauseNs) pause *= 2;
  }
}

// The second part of jax_ub_wait.
__device__ void WaitForFlags(const WaitParams& params) {
  if (threadIdx.x >= params.num_flags) return;
  const RankWords& own = params.waiting.own;
  if (LoadAcquire(own.failed) != 0) return;
  const uint64_t epoch = LoadAcquire(own.epoch);
  const uint64_t current = NextCall(epoch, params.waiting.tag);
  WaitFor(params.waiting, params.flags[threadIdx.x],
          params.ahead != 0 ? current : epoch, current);
}

// The first part of jax_ub_end. It decides whether the rank has failed.
__device__ void EndCall(const EndParams& params) {
  const uint64_t word = NextCall(LoadAcquire(params.own.epoch), params.tag);
  // A peer may write `poison` between the loads of two threads. Then only some targets
  // get the failure here; a later kernel of this rank writes it to the others.
  const uint64_t poison = LoadAcquire(params.own.poison);
  uint64_t failed = LoadAcquire(params.own.failed);
  ErrorRecord what = {};
  what.rank = params.rank;
  if (failed == 0 && poison != 0) {
    ReadPoison(poison, what);
    failed = FailedWord(what);
  }
  SignalAll(params.freed, word, failed);
  SyncWarp();  // every thread with a target has read the epoch
  if (threadIdx.x != 0) return;
  if (failed == 0) return StoreRelease(params.own.epoch, word);
  if (poison == 0) return;
  what.slot = ErrorRecord::kNoSlot;
  what.chunk = -1;
  what.call = params.call;
  if (!Claim(params.own.failed, failed)) return;
  Record(params.own, what, ErrorRecord::kPeerFailed);
}

// Fills the results with NaN if the rank has failed.
__device__ void FillNan(const RankWords& own, const NanFill& nan_fill) {
  if (LoadAcquire(own.failed) == 0) return;
  for (uint32_t i = 0; i < nan_fill.num_results; ++i) {
    const NanFill::Result& result = nan_fill.results[i];
    // XLA aligns results to at least 16 bytes.
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

// The second part of jax_ub_end.
__device__ void FillResults(const EndParams& params) {
  FillNan(params.own, params.nan_fill);
}

}  // namespace

extern "C" __global__ void __launch_bounds__(32)
    jax_ub_signal(const __grid_constant__ SignalParams params) {
  SignalAll(params.signals, NextCall(LoadAcquire(params.own.epoch), params.tag),
            LoadAcquire(params.own.failed));
}

// One block: all of its threads must agree whether the rank has failed.
extern "C" __global__ void __launch_bounds__(kEndThreads)
    jax_ub_end(const __grid_constant__ EndParams params) {
  EndCall(params);
  SyncBlock();
  FillResults(params);
}

extern "C" __global__ void __launch_bounds__(kEndThreads)
    jax_ub_fill_nan(const __grid_constant__ NanFillParams params) {
  FillNan(params.own, params.nan_fill);
}

extern "C" __global__ void __launch_bounds__(32)
    jax_ub_wait(const __grid_constant__ WaitParams params) {
  SignalAndAnnounce(params);
  SyncWarp();  // all signals are sent before any thread waits
  WaitForFlags(params);
}

extern "C" __global__ void __launch_bounds__(32)
    jax_ub_check_partition(const __grid_constant__ PartitionCheckParams params) {
  if (threadIdx.x != 0) return;
  ErrorRecord what = params.what;
  what.partition = *reinterpret_cast<const uint32_t*>(params.partition);
  if (what.partition == params.expected) return;
  Fail(params.own, params.peers, what, ErrorRecord::kMisplaced);
}

}  // namespace jax_ub::gpu
