// Flags between ranks: one warp each, and nothing that depends on the host.
//
// What a stream did before a signal, be it a kernel or a copy engine, happens before the
// signal's store, which releases it to the whole system; the waiter's load acquires it
// for what its stream does next. A wait looks at its flag first: if that is reached,
// neither the host's memory nor the clock is touched.

#include "platform/cuda/instructions.cuh"
#include "transport/cuda/flag_params.h"

namespace jax_ub::gpu {
namespace {

constexpr uint32_t kFirstPauseNs = 32;
constexpr uint32_t kLastPauseNs = 512;
constexpr uint32_t kLooksPerHostLook = 16;  // the host's memory is a microsecond away

// The first failure of a rank writes its record, `code` last; later ones leave it alone.
__device__ void Fail(const RankWords& own, ErrorRecord what, uint32_t code) {
  if (!Claim(own.failed)) return;
  auto* record = reinterpret_cast<ErrorRecord*>(own.error);
  record->rank = what.rank;
  record->peer = what.peer;
  record->slot = what.slot;
  record->chunk = what.chunk;
  record->call = what.call;
  record->waited_ns = what.waited_ns;
  record->partition = what.partition;
  StoreRelease(&record->code, code);
}

// Before anything else that the rank does.
__device__ void TellAndFail(const RankWords& own,
                            const PeerPoisons& peers,
                            ErrorRecord what,
                            uint32_t code) {
  for (uint32_t i = 0; i < peers.num_peers; ++i) {
    StoreRelease(peers.words[i], what.rank + 1);
  }
  Fail(own, what, code);
}

// One target a lane.
__device__ void SignalAll(const SignalParams& params, uint64_t epoch, bool failed) {
  if (threadIdx.x >= params.num_targets) return;
  const FlagTarget& target = params.targets[threadIdx.x];
  if (failed) {
    StoreRelease(target.poison, params.rank + 1);
  } else {
    StoreRelease(target.flag, epoch + 1);
  }
}

}  // namespace

extern "C" __global__ void __launch_bounds__(32)
    jax_ub_signal(const __grid_constant__ SignalParams params) {
  SignalAll(params, LoadAcquire(params.own.epoch), LoadAcquire(params.own.failed) != 0);
}

extern "C" __global__ void __launch_bounds__(32)
    jax_ub_end(const __grid_constant__ SignalParams params) {
  const uint64_t epoch = LoadAcquire(params.own.epoch);
  // It may come between the lanes: then some peers are told, and the others told later.
  const uint64_t poison = LoadAcquire(params.own.poison);
  const bool failed = poison != 0 || LoadAcquire(params.own.failed) != 0;
  SignalAll(params, epoch, failed);
  SyncWarp();  // every lane has read the epoch
  if (threadIdx.x != 0) return;
  if (!failed) return StoreRelease(params.own.epoch, epoch + 1);
  if (poison == 0) return;
  ErrorRecord what = {};
  what.rank = params.rank;
  what.peer = static_cast<uint32_t>(poison - 1);
  what.slot = ErrorRecord::kNoSlot;
  what.chunk = -1;
  what.call = params.call;
  Fail(params.own, what, ErrorRecord::kPeerFailed);
}

extern "C" __global__ void __launch_bounds__(32)
    jax_ub_wait(const __grid_constant__ WaitParams params) {
  if (threadIdx.x != 0) return;
  const RankWords& own = params.own;
  const uint64_t wanted = LoadAcquire(own.epoch) + params.ahead;
  const uint64_t began = Now();
  uint32_t pause = kFirstPauseNs;
  for (uint32_t look = 0;; ++look) {
    if (static_cast<int64_t>(LoadAcquire(params.flag) - wanted) >= 0) return;
    if (LoadAcquire(own.failed) != 0) return;
    ErrorRecord what = params.what;
    what.waited_ns = Now() - began;
    const auto fail = [&](uint32_t code) {
      TellAndFail(own, params.peers, what, code);
    };
    if (const uint64_t poison = LoadAcquire(own.poison); poison != 0) {
      what.peer = static_cast<uint32_t>(poison - 1);
      return fail(ErrorRecord::kPeerFailed);
    }
    if (what.waited_ns >= params.timeout_ns) {
      return fail(ErrorRecord::kDeadline);
    }
    const auto* record = reinterpret_cast<const ErrorRecord*>(own.error);
    if (look % kLooksPerHostLook == 0 && LoadAcquire(&record->poisoned) != 0) {
      return fail(ErrorRecord::kPoisoned);
    }
    Pause(pause);
    if (pause < kLastPauseNs) pause *= 2;
  }
}

extern "C" __global__ void __launch_bounds__(32)
    jax_ub_check_place(const __grid_constant__ PlaceParams params) {
  if (threadIdx.x != 0) return;
  ErrorRecord what = params.what;
  what.partition = *reinterpret_cast<const uint32_t*>(params.partition);
  if (what.partition == params.expected) return;
  TellAndFail(params.own, params.peers, what, ErrorRecord::kMisplaced);
}

extern "C" __global__ void __launch_bounds__(256)
    jax_ub_spoil(const __grid_constant__ SpoilParams params) {
  if (LoadAcquire(params.own.failed) == 0) return;
  const uint64_t first = blockIdx.x * uint64_t{blockDim.x} + threadIdx.x;
  const uint64_t stride = gridDim.x * uint64_t{blockDim.x};
  for (uint32_t i = 0; i < params.num_results; ++i) {
    const SpoilParams::Result& result = params.results[i];
    // Results of XLA begin at multiples of 16 bytes.
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
