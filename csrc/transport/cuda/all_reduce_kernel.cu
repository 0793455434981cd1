// All-reduces few rows with one kernel, which all_reduce_params.h describes. Between
// the functions below, the kernel synchronizes the threads of a block.
//
// Memory order: all threads of a block push partial sums. After a barrier of the block,
// one thread per peer stores the peer's flag with release, which makes the pushes of
// all threads visible. One thread per peer loads the peer's flag with acquire. After
// another barrier, all threads read.

#include "reduce/cuda/elements.cuh"
#include "transport/cuda/all_reduce_params.h"
#include "transport/cuda/flags.cuh"

namespace jax_ub::gpu {
namespace {

// Number of ranks whose partial sums a thread loads before it adds them, so that the
// loads overlap.
constexpr uint32_t kPartsInFlight = 8;

struct Elements {
  int64_t begin;
  int64_t end;
};

__device__ Elements ElementsOfBlock(const AllReduceParams& params) {
  const int64_t vectors =
      (params.num_elements + kAllReduceVector - 1) / kAllReduceVector;
  const auto bound = [&](int64_t block) {
    const int64_t end = block * vectors / gridDim.x * kAllReduceVector;
    return end < params.num_elements ? end : params.num_elements;
  };
  return {bound(blockIdx.x), bound(blockIdx.x + int64_t{1})};
}

__device__ uint64_t FlagOfBlock(const AllReduceParams& params, uint64_t flag) {
  return flag + blockIdx.x * params.num_peers * uint64_t{kFlagLineBytes};
}

__device__ int64_t SizeOfPartial(const AllReduceParams& params) {
  return params.dtype == DType::kF32 ? 4 : 2;
}

// Returns the address at which this rank reads the partial sums of `rank`. A peer has
// pushed its partial sums into a slot of this rank.
__device__ uint64_t PartialOf(const AllReduceParams& params, uint32_t rank) {
  const uint32_t own = params.waiting.rank;
  if (rank == own) return params.partial;
  return params.peers[rank < own ? rank : rank - 1].from;
}

__device__ void AnnounceAllReduce(const AllReduceParams& params,
                                  const CallWords& words) {
  if (blockIdx.x != 0 || threadIdx.x >= params.num_peers || words.failed != 0) return;
  StoreRelaxed(params.peers[threadIdx.x].announcement, words.current);
}

// Waits until the peers' slots to which this rank writes are free. Uses one thread per
// peer. Returns false if the rank has failed.
__device__ bool AwaitFreeSlots(const AllReduceParams& params, const CallWords& words) {
  if (words.failed != 0) return false;
  if (threadIdx.x >= params.num_peers) return true;
  return WaitFor(params.waiting, params.peers[threadIdx.x].freed, words.epoch,
                 words.current);
}

// Copies units [begin, end) of this rank's partial sums into the slots of all peers.
// Each rank starts with a different peer, so that the ranks do not all write to the
// same peer.
template <typename Unit>
__device__ void PushUnits(const AllReduceParams& params, int64_t begin, int64_t end) {
  const auto* const from = reinterpret_cast<const Unit*>(params.partial);
  for (int64_t at = begin + threadIdx.x; at < end; at += blockDim.x) {
    const Unit unit = from[at];
    for (uint32_t i = 0; i < params.num_peers; ++i) {
      const uint32_t peer = (i + params.waiting.rank) % params.num_peers;
      reinterpret_cast<Unit*>(params.peers[peer].to)[at] = unit;
    }
  }
}

__device__ void PushPartials(const AllReduceParams& params) {
  const Elements elements = ElementsOfBlock(params);
  const int64_t size = SizeOfPartial(params);
  int64_t rest = elements.begin;
  if (params.is_aligned != 0) {
    const int64_t per_unit = 16 / size;
    rest = elements.end / per_unit * per_unit;
    PushUnits<uint4>(params, elements.begin / per_unit, rest / per_unit);
  }
  if (size == 4) {
    PushUnits<uint32_t>(params, rest, elements.end);
  } else {
    PushUnits<uint16_t>(params, rest, elements.end);
  }
}

__device__ void SignalPushed(const AllReduceParams& params, const CallWords& words) {
  if (threadIdx.x >= params.num_peers) return;
  StoreRelease(FlagOfBlock(params, params.peers[threadIdx.x].signal), words.current);
}

// Waits until, on every peer, the thread block with the same index has pushed its
// partial sums. Uses one thread per peer. Returns false if the rank has failed.
__device__ bool AwaitPushed(const AllReduceParams& params, const CallWords& words) {
  if (threadIdx.x >= params.num_peers) return true;
  AwaitedFlag arrived = params.peers[threadIdx.x].arrived;
  arrived.flag = FlagOfBlock(params, arrived.flag);
  return WaitFor(params.waiting, arrived, words.current, words.current);
}

// Adds bias and residual to `sums`, the sums of consecutive elements from index `at`
// on. Rounds the results to the output dtype and stores them.
template <int kCount>
__device__ void FinishElements(const AllReduceParams& params,
                               int64_t at,
                               float (&sums)[kCount]) {
  for (uint32_t i = 0; i < params.num_addends; ++i) {
    const SumAddend& addend = params.addends[i];
    int64_t index = at < addend.period ? at : at % addend.period;
    for (float& sum : sums) {
      sum += LoadElement(addend.data, index, addend.dtype);
      if (++index == addend.period) index = 0;
    }
  }
  for (int e = 0; e < kCount; ++e) {
    StoreElement(params.out, at + e, params.out_dtype, sums[e]);
  }
}

// Sums the elements of this block over all ranks, in units of 16 bytes. Returns the
// index of the first element that is not in a whole unit.
template <DType kDType>
__device__ int64_t SumUnits(const AllReduceParams& params, const Elements& elements) {
  constexpr int kPerUnit = kDType == DType::kF32 ? 4 : 8;
  const int64_t end = elements.end / kPerUnit * kPerUnit;
  const uint32_t num_ranks = params.num_peers + 1;
  for (int64_t at = elements.begin + int64_t{kPerUnit} * threadIdx.x; at < end;
       at += int64_t{kPerUnit} * blockDim.x) {
    float sums[kPerUnit];
    for (uint32_t first = 0; first < num_ranks; first += kPartsInFlight) {
      uint4 units[kPartsInFlight] = {};
      for (uint32_t i = 0; i < kPartsInFlight; ++i) {
        if (first + i >= num_ranks) continue;
        const uint64_t partial = PartialOf(params, first + i);
        units[i] = reinterpret_cast<const uint4*>(partial)[at / kPerUnit];
      }
      for (uint32_t i = 0; i < kPartsInFlight; ++i) {
        if (first + i >= num_ranks) continue;
        float x[kPerUnit];
        WidenUnit<kDType>(units[i], x);
        for (int e = 0; e < kPerUnit; ++e) {
          sums[e] = first + i == 0 ? x[e] : sums[e] + x[e];
        }
      }
    }
    FinishElements(params, at, sums);
  }
  return end;
}

__device__ void SumPartials(const AllReduceParams& params) {
  const Elements elements = ElementsOfBlock(params);
  int64_t rest = elements.begin;
  if (params.is_aligned != 0) {
    rest = params.dtype == DType::kF32    ? SumUnits<DType::kF32>(params, elements)
           : params.dtype == DType::kBF16 ? SumUnits<DType::kBF16>(params, elements)
                                          : SumUnits<DType::kF16>(params, elements);
  }
  for (int64_t at = rest + threadIdx.x; at < elements.end; at += blockDim.x) {
    float sum[] = {LoadElement(PartialOf(params, 0), at, params.dtype)};
    for (uint32_t rank = 1; rank <= params.num_peers; ++rank) {
      sum[0] += LoadElement(PartialOf(params, rank), at, params.dtype);
    }
    FinishElements(params, at, sum);
  }
}

}  // namespace

extern "C" __global__ void __launch_bounds__(kAllReduceThreads, 1)
    jax_ub_all_reduce(const __grid_constant__ AllReduceParams params) {
  const CallWords words = LoadCall(params.waiting.own, params.waiting.tag);
  AnnounceAllReduce(params, words);
  SyncWarp();
  if (SyncBlockAny(!AwaitFreeSlots(params, words))) return;
  PushPartials(params);
  SyncBlock();
  SignalPushed(params, words);
  SyncWarp();
  if (SyncBlockAny(!AwaitPushed(params, words))) return;
  SumPartials(params);
}

}  // namespace jax_ub::gpu
