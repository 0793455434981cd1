// Functions of the kernels that exchange flags between ranks, without the host.
//
// Memory order: the store of a signal releases, at system scope, the earlier work of
// the stream by kernels and copy engines. The load of a wait acquires this work for the
// later work of the waiting stream. A wait polls its flag often, and everything else
// rarely.
#pragma once

#include "platform/cuda/instructions.cuh"
#include "transport/cuda/flag_params.h"

namespace jax_ub::gpu {
namespace {

constexpr uint32_t kFirstPauseNs = 32;
constexpr uint32_t kLastPauseNs = 512;
// A waiting thread checks only every 16 iterations whether a rank has failed or a peer
// runs a different call. Both are rare, and the check reads host memory, which takes
// about a microsecond.
constexpr uint32_t kIterationsPerCheck = 16;

// The state of a rank, which each kernel of a call loads first. Only kernels on one
// stream change the state, so it does not change while a kernel runs.
struct CallWords {
  uint64_t epoch;
  uint64_t current;  // the flag value of this call
  uint64_t failed;
};

// Loads the state of the rank for a call with this tag. The loads need no acquire
// order, because only earlier kernels of the same stream have written the words.
__device__ CallWords LoadCall(const RankWords& own, uint32_t tag) {
  const uint64_t epoch = LoadRelaxed(own.epoch);
  const uint64_t failed = LoadRelaxed(own.failed);
  return {epoch, (epoch | kTagMask) + 1 + tag, failed};
}

// Returns whether a flag has the expected epoch (call number) but a different tag,
// which means that the ranks make different calls.
__device__ bool IsOtherCall(uint64_t word, uint64_t expected) {
  return word != expected && (word ^ expected) <= kTagMask;
}

__device__ uint64_t FailedWord(const ErrorRecord& what) {
  return (what.rank + 1) | uint64_t{what.tag} << kFailedRankBits |
         uint64_t{what.other_tag} << (kFailedRankBits + kTagBits);
}

// Decodes the failure that a peer has written to this rank's `poison`.
__device__ void ReadPoison(uint64_t poison, ErrorRecord& what) {
  what.peer = static_cast<uint32_t>(poison & kFailedRankMask) - 1;
  what.tag = static_cast<uint32_t>(poison >> kFailedRankBits & kTagMask);
  what.other_tag = static_cast<uint32_t>(poison >> (kFailedRankBits + kTagBits));
}

// Fills the rank's error record in host memory. Stores `code` last, because readers
// check `code` first.
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

// Records the first failure of this rank, and reports it to the peers. `failed` is the
// new value of RankWords::failed. Does nothing if the rank has already failed.
__device__ void Fail(const RankWords& own,
                     const PeerWords& poisons,
                     uint64_t failed,
                     const ErrorRecord& what,
                     uint32_t code) {
  if (!Claim(own.failed, failed)) return;
#ifdef __CUDACC__
#pragma unroll 1  // unrolled, the loop would use most of the wait kernel's registers
#endif
  for (uint32_t i = 0; i < poisons.num_peers; ++i) {
    StoreRelease(poisons.words[i], failed);
  }
  Record(own, what, code);
}

// Waits until *awaited.flag equals `wanted`, and returns true. Returns false if this
// rank fails first. It fails after the timeout, if the host or a peer reports a
// failure, or if the peer announces a call that differs from this call, whose flag
// value is `current`.
__device__ bool WaitFor(const WaitingCall& waiting,
                        const AwaitedFlag& awaited,
                        uint64_t wanted,
                        uint64_t current) {
  const RankWords& own = waiting.own;
  const uint64_t began = Now();
  uint32_t pause = kFirstPauseNs;
  for (uint32_t iteration = 1;; ++iteration) {
    if (LoadAcquire(awaited.flag) == wanted) return true;
    const uint64_t waited_ns = Now() - began;
    const bool is_late = waited_ns >= waiting.timeout_ns;
    if (is_late || iteration % kIterationsPerCheck == 0) {
      if (LoadAcquire(own.failed) != 0) return false;
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
        const uint64_t failed = poison != 0 ? poison : FailedWord(what);
        Fail(own, waiting.poisons, failed, what, code);
        return false;
      }
    }
    Pause(pause);
    if (pause < kLastPauseNs) pause *= 2;
  }
}

}  // namespace
}  // namespace jax_ub::gpu
