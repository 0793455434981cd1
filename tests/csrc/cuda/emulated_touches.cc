// Computes the memory that a launch of one of the project's kernels reads and writes,
// which the emulated driver checks before it runs the kernel.
#include <algorithm>
#include <cstring>

#include "cuda/emulated_machine.h"
#include "gemm/cuda/fp8_scale_kernels.h"
#include "reduce/cuda/sum_params.h"
#include "transport/cuda/all_reduce_params.h"
#include "transport/cuda/flag_params.h"
#include "transport/cuda/multicast_params.h"

namespace jax_ub::emulated {

namespace {

template <typename Params>
Params As(const void* params) {
  Params copy;
  std::memcpy(&copy, params, sizeof(copy));
  return copy;
}

Touch Word(uint64_t address) { return {address, 1, sizeof(uint64_t), 0}; }

void Add(std::vector<Touch>& touches, const RankWords& words) {
  for (const uint64_t word : {words.epoch, words.failed, words.poison}) {
    touches.push_back(Word(word));
  }
  touches.push_back({words.error, 1, sizeof(ErrorRecord), 0});
}

void Add(std::vector<Touch>& touches, const FlagTargets& signals) {
  for (uint32_t i = 0; i < std::min<uint32_t>(signals.num_targets, kMaxRanks); ++i) {
    touches.push_back(Word(signals.targets[i].flag));
    touches.push_back(Word(signals.targets[i].poison));
  }
}

void Add(std::vector<Touch>& touches, const PeerWords& peers) {
  for (uint32_t i = 0; i < std::min<uint32_t>(peers.num_peers, kMaxRanks); ++i) {
    touches.push_back(Word(peers.words[i]));
  }
}

void Add(std::vector<Touch>& touches, const NanFill& nan_fill) {
  for (uint32_t i = 0; i < std::min<uint32_t>(nan_fill.num_results, kMaxResults); ++i) {
    const NanFill::Result& result = nan_fill.results[i];
    touches.push_back({result.data, 1, static_cast<int64_t>(result.size_bytes), 0});
  }
}

std::vector<Touch> OfSignal(const SignalParams& params) {
  std::vector<Touch> touches;
  Add(touches, params.own);
  Add(touches, params.signals);
  return touches;
}

std::vector<Touch> OfEnd(const EndParams& params) {
  std::vector<Touch> touches;
  Add(touches, params.own);
  Add(touches, params.freed);
  Add(touches, params.nan_fill);
  return touches;
}

std::vector<Touch> OfWait(const WaitParams& params) {
  std::vector<Touch> touches;
  for (uint32_t i = 0; i < std::min<uint32_t>(params.num_flags, kMaxRanks); ++i) {
    touches.push_back(Word(params.flags[i].flag));
    touches.push_back(Word(params.flags[i].announced));
  }
  Add(touches, params.waiting.own);
  Add(touches, params.waiting.poisons);
  Add(touches, params.signals);
  Add(touches, params.announcements);
  return touches;
}

std::vector<Touch> OfCheckPartition(const PartitionCheckParams& params) {
  std::vector<Touch> touches = {{params.partition, 1, sizeof(uint32_t), 0}};
  Add(touches, params.own);
  Add(touches, params.peers);
  return touches;
}

std::vector<Touch> OfFillNan(const NanFillParams& params) {
  std::vector<Touch> touches;
  Add(touches, params.own);
  Add(touches, params.nan_fill);
  return touches;
}

Touch OfPart(const SumParams& params, const SumPart& part) {
  const int64_t element = part.dtype == DType::kF32 ? 4 : 2;
  return {part.data, params.rows, params.columns * element, part.row_stride * element};
}

std::vector<Touch> OfSum(const SumParams& params) {
  std::vector<Touch> touches = {OfPart(params, params.out)};
  for (uint32_t i = 0; i < std::min<uint32_t>(params.num_parts, kMaxParts); ++i) {
    touches.push_back(OfPart(params, params.parts[i]));
  }
  return touches;
}

std::vector<Touch> OfCopy(const CopyParams& params) {
  return {{params.from, params.num_rows, params.row_bytes, params.from_stride},
          {params.to, params.num_rows, params.row_bytes, params.to_stride}};
}

std::vector<Touch> OfTranspose(const TransposeParams& params) {
  return {{params.from, params.rows, params.columns, params.from_stride},
          {params.to, params.columns, params.rows, params.to_stride}};
}

Touch OfBytes(const ByteMatrix& matrix, int64_t outer, int64_t inner) {
  if (matrix.inner_stride == 1) return {matrix.data, outer, inner, matrix.outer_stride};
  return {matrix.data, inner, outer, matrix.inner_stride};
}

std::vector<Touch> OfBlockScales(const BlockScalesParams& params) {
  const int64_t k = params.num_blocks * kScaledBlock;
  const Touch to = {params.to, 1, Fp8ScaleKernels::TileBytes(params.outer, k), 0};
  if (!params.converts) return {OfBytes(params.scales, params.outer, k / 32), to};
  return {OfBytes(params.scales, params.outer / 32, k), to,
          OfBytes(params.values, params.outer, k),
          OfBytes(params.converted, params.outer, k)};
}

std::vector<Touch> OfRowScales(const RowScalesParams& params, bool converts) {
  const int64_t num_parts = Fp8ScaleKernels::NumRowParts(params.k);
  std::vector<Touch> touches = {OfBytes(params.values, params.outer, params.k),
                                {params.scales, 1, params.k * 4, 0},
                                {params.largest, 1, num_parts * params.outer * 4, 0}};
  if (converts) {
    touches.push_back({params.to, 1, params.outer * 4, 0});
    touches.push_back({params.converted, 1, params.outer * params.k, 0});
  }
  return touches;
}

std::vector<Touch> OfAllReduce(const AllReduceParams& params) {
  std::vector<Touch> touches;
  const auto add = [&](uint64_t data, int64_t num_elements, DType dtype) {
    touches.push_back({data, 1, num_elements * (dtype == DType::kF32 ? 4 : 2), 0});
  };
  Add(touches, params.waiting.own);
  Add(touches, params.waiting.poisons);
  add(params.partial, params.num_elements, params.dtype);
  add(params.out, params.num_elements, params.out_dtype);
  for (uint32_t i = 0; i < std::min<uint32_t>(params.num_addends, kMaxSumAddends);
       ++i) {
    const SumAddend& addend = params.addends[i];
    add(addend.data, addend.period, addend.dtype);
  }
  for (uint32_t i = 0; i < std::min<uint32_t>(params.num_peers, kMaxRanks - 1); ++i) {
    const AllReducePeer& peer = params.peers[i];
    add(peer.to, params.num_elements, params.dtype);
    add(peer.from, params.num_elements, params.dtype);
    for (const uint64_t word :
         {peer.announcement, peer.freed.flag, peer.freed.announced}) {
      touches.push_back(Word(word));
    }
    for (const uint64_t flags : {peer.signal, peer.arrived.flag}) {
      touches.push_back({flags, kMaxAllReduceBlocks, sizeof(uint64_t),
                         params.num_peers * kFlagLineBytes});
    }
  }
  return touches;
}

std::vector<Touch> OfMulticastSum(const MulticastSumParams& params) {
  const int64_t bytes = (params.end - params.begin) * kMulticastBytes;
  Touch data = {params.data + params.begin * kMulticastBytes, 1, bytes, 0};
  data.by_multicast = true;
  std::vector<Touch> touches = {data};
  Add(touches, params.own);
  for (uint32_t i = 0; i < std::min<uint32_t>(params.num_addends, 2); ++i) {
    const SumAddend& addend = params.addends[i];
    const int64_t element = addend.dtype == DType::kF32 ? 4 : 2;
    touches.push_back({addend.data, 1, addend.period * element, 0});
  }
  return touches;
}

}  // namespace

std::vector<Touch> TouchedBy(std::string_view kernel, const void* params) {
  if (kernel == kSignalKernel) return OfSignal(As<SignalParams>(params));
  if (kernel == kEndKernel) return OfEnd(As<EndParams>(params));
  if (kernel == kWaitKernel) return OfWait(As<WaitParams>(params));
  if (kernel == kCheckPartitionKernel)
    return OfCheckPartition(As<PartitionCheckParams>(params));
  if (kernel == kFillNanKernel) return OfFillNan(As<NanFillParams>(params));
  if (kernel == kAllReduceKernel) return OfAllReduce(As<AllReduceParams>(params));
  if (kernel == kMulticastSumKernel) {
    return OfMulticastSum(As<MulticastSumParams>(params));
  }
  if (kernel == kSumKernel) return OfSum(As<SumParams>(params));
  if (kernel == kCopyKernel) return OfCopy(As<CopyParams>(params));
  if (kernel == kTransposeKernel) return OfTranspose(As<TransposeParams>(params));
  if (kernel == kBlockScalesKernel) return OfBlockScales(As<BlockScalesParams>(params));
  if (kernel == kRowAmaxKernel) return OfRowScales(As<RowScalesParams>(params), false);
  if (kernel == kConvertRowsKernel) {
    return OfRowScales(As<RowScalesParams>(params), true);
  }
  return {};
}

}  // namespace jax_ub::emulated
