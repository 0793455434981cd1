#include "transport/cuda/cuda_slots.h"

#include <algorithm>
#include <stdexcept>
#include <string>

#include "gemm/views.h"
#include "platform/error.h"

namespace jax_ub {

namespace {

CUdeviceptr LineOf(CUdeviceptr first, int index) {
  return first + index * kFlagLineBytes;
}

// Copies `results`, which a failed rank fills with NaN, to the kernel parameters
// `nan_fill`. Copies at most kMaxResults of them, and returns how many it has copied.
size_t Fill(NanFill& nan_fill, std::span<const NanFill::Result> results) {
  const size_t count = std::min<size_t>(results.size(), kMaxResults);
  nan_fill.num_results = static_cast<uint32_t>(count);
  std::copy_n(results.begin(), count, nan_fill.results);
  return count;
}

// Moves the first signals, at most kMaxRanks, from `signals` to `targets`, which are
// the parameters of one kernel.
void Take(std::vector<FlagTarget>& signals, FlagTargets& targets) {
  const size_t count = std::min<size_t>(signals.size(), kMaxRanks);
  targets.num_targets = static_cast<uint32_t>(count);
  std::copy_n(signals.begin(), count, targets.targets);
  signals.erase(signals.begin(), signals.begin() + static_cast<ptrdiff_t>(count));
}

}  // namespace

CudaSlots::CudaSlots(int rank,
                     std::span<const RankSlotAddress> addresses,
                     CUdeviceptr error,
                     const CallIds& call,
                     const SlotAddresses& slots,
                     const SlotStream& stream)
    : rank_(rank),
      addresses_(addresses),
      words_{addresses[rank].epoch, addresses[rank].failed, addresses[rank].poison,
             error},
      call_(call),
      slots_(slots),
      stream_(stream),
      is_free_(addresses.size(), false) {
  if (addresses.size() > kMaxRanks) {
    throw std::invalid_argument("CudaSlots: " + std::to_string(addresses.size()) +
                                " ranks, expected at most " +
                                std::to_string(kMaxRanks));
  }
}

int64_t CudaSlots::StrideOf(int64_t slot_bytes) {
  return (slot_bytes + kSlotAlignment - 1) / kSlotAlignment * kSlotAlignment;
}

CUdeviceptr CudaSlots::SlotOf(int rank, int slot) const {
  return addresses_[rank].slots + slot * StrideOf(slots_.slot_bytes);
}

const std::byte* CudaSlots::slot(int index) const {
  return reinterpret_cast<const std::byte*>(SlotOf(rank_, index));
}

void CudaSlots::Write(int peer, int slot, const Rows& rows) {
  const int64_t size_bytes = rows.slot_offset + rows.num_rows * rows.row_bytes;
  if (size_bytes > slots_.slot_bytes) {
    throw Error("jax_ub: a split of " + std::to_string(size_bytes) +
                " bytes does not fit into a slot of " +
                std::to_string(slots_.slot_bytes));
  }
  EnqueueCopy(*stream_.driver, *stream_.sums, stream_.stream,
              {.from = AddressOf(rows.data),
               .to = SlotOf(peer, slot) + static_cast<CUdeviceptr>(rows.slot_offset),
               .num_rows = rows.num_rows,
               .row_bytes = rows.row_bytes,
               .from_stride = rows.stride_bytes,
               .to_stride = rows.row_bytes,
               .unit_bytes = 0},
              stream_.copies);
}

void CudaSlots::Signal(int peer, int slot) {
  signals_.push_back({LineOf(addresses_[peer].arrived, slot), addresses_[peer].poison});
}

void CudaSlots::SendSignals(size_t num_left) {
  while (signals_.size() > num_left) {
    SignalParams params = {.own = words_, .tag = call_.tag, .signals = {}};
    Take(signals_, params.signals);
    stream_.flags->Signal(stream_.stream, params);
  }
}

PeerWords CudaSlots::PoisonsOfPeers() const {
  PeerWords poisons = {};
  for (int other = 0; other < num_ranks(); ++other) {
    if (other != rank_) poisons.words[poisons.num_peers++] = addresses_[other].poison;
  }
  return poisons;
}

void CudaSlots::CheckPartition(CUdeviceptr partition, uint32_t expected) {
  PartitionCheckParams params = {};
  params.own = words_;
  params.partition = partition;
  params.expected = expected;
  params.what.rank = rank_;
  params.what.peer = rank_;
  params.what.slot = ErrorRecord::kNoSlot;
  params.what.chunk = -1;
  params.what.call = call_.number;
  params.peers = PoisonsOfPeers();
  stream_.flags->CheckPartition(stream_.stream, params);
}

WaitingCall CudaSlots::WaitingCallOf(double timeout_s) const {
  return {.own = words_,
          .timeout_ns = static_cast<uint64_t>(std::max(timeout_s, 0.0) * 1e9),
          .rank = static_cast<uint32_t>(rank_),
          .call = call_.number,
          .tag = call_.tag,
          .poisons = PoisonsOfPeers()};
}

void CudaSlots::WaitFor(std::span<const AwaitedFlag> flags,
                        bool ahead,
                        double timeout_s) {
  if (flags.empty()) return;
  if (has_ended_) Finish({});
  SendSignals(kMaxRanks);
  WaitParams params = {};
  params.waiting = WaitingCallOf(timeout_s);
  params.ahead = ahead ? 1 : 0;
  Take(signals_, params.signals);
  for (int other = 0; other < num_ranks() && !is_announced_; ++other) {
    if (other == rank_) continue;
    params.announcements.words[params.announcements.num_peers++] =
        LineOf(addresses_[other].announced, rank_);
  }
  is_announced_ = true;
  for (; !flags.empty(); flags = flags.subspan(params.num_flags)) {
    params.num_flags = static_cast<uint32_t>(std::min<size_t>(flags.size(), kMaxRanks));
    std::copy_n(flags.begin(), params.num_flags, params.flags);
    stream_.flags->Wait(stream_.stream, params);
    params.signals.num_targets = params.announcements.num_peers = 0;
  }
}

AwaitedFlag CudaSlots::FlagOf(CUdeviceptr flag,
                              const PeerSlot& slot,
                              uint32_t slot_index) const {
  return {.flag = flag,
          .announced = LineOf(addresses_[rank_].announced, slot.peer),
          .peer = static_cast<uint32_t>(slot.peer),
          .slot = slot_index,
          .chunk = slot.chunk};
}

void CudaSlots::Wait(int peer, int slot, const WaitReason& reason) {
  const PeerSlot one = {peer, slot, reason.chunk};
  WaitAll({&one, 1}, reason);
}

void CudaSlots::WaitAll(std::span<const PeerSlot> slots, const WaitReason& reason) {
  std::vector<AwaitedFlag> flags;
  for (const PeerSlot& slot : slots) {
    flags.push_back(
        FlagOf(LineOf(addresses_[rank_].arrived, slot.slot), slot, slot.slot));
  }
  WaitFor(flags, true, reason.timeout_s);
}

void CudaSlots::WaitFree(int peer, int slot, const WaitReason& reason) {
  const PeerSlot one = {peer, slot, reason.chunk};
  WaitAllFree({&one, 1}, reason);
}

void CudaSlots::WaitAllFree(std::span<const PeerSlot> slots, const WaitReason& reason) {
  std::vector<AwaitedFlag> flags;
  for (const PeerSlot& slot : slots) {
    if (is_free_[slot.peer]) continue;
    is_free_[slot.peer] = true;
    flags.push_back(
        FlagOf(LineOf(addresses_[rank_].freed, slot.peer), slot, ErrorRecord::kNoSlot));
  }
  WaitFor(flags, false, reason.timeout_s);
}

void CudaSlots::EndCall() {
  SendSignals(0);
  is_free_.assign(is_free_.size(), false);
  is_announced_ = false;
  has_ended_ = true;
}

void CudaSlots::Finish(std::span<const NanFill::Result> results) {
  EndParams params = {};
  params.own = words_;
  params.rank = rank_;
  params.call = call_.number;
  params.tag = call_.tag;
  for (int peer = 0; peer < num_ranks(); ++peer) {
    if (peer == rank_) continue;
    params.freed.targets[params.freed.num_targets++] = {
        LineOf(addresses_[peer].freed, rank_), addresses_[peer].poison};
  }
  results = results.subspan(Fill(params.nan_fill, results));
  stream_.flags->End(stream_.stream, params);
  has_ended_ = false;
  while (!results.empty()) {
    NanFillParams more = {.own = words_, .nan_fill = {}};
    results = results.subspan(Fill(more.nan_fill, results));
    stream_.flags->FillNan(stream_.stream, more);
  }
}

void CudaSlots::AllReduce(const AllReduceSum& sum, const WaitReason& reason) {
  const int64_t size_bytes = sum.num_elements * SizeOf(sum.dtype);
  if (size_bytes > slots_.slot_bytes) {
    throw Error("jax_ub: partial sums of " + std::to_string(size_bytes) +
                " bytes do not fit into a slot of " +
                std::to_string(slots_.slot_bytes));
  }
  AllReduceParams params = {};
  params.waiting = WaitingCallOf(reason.timeout_s);
  params.dtype = sum.dtype;
  params.out_dtype = sum.out_dtype;
  params.num_elements = sum.num_elements;
  params.partial = AddressOf(sum.partial);
  params.out = AddressOf(sum.out);
  params.num_addends = static_cast<uint32_t>(sum.addends.size());
  std::copy(sum.addends.begin(), sum.addends.end(), params.addends);
  for (int peer = 0; peer < num_ranks(); ++peer) {
    if (peer == rank_) continue;
    // `from` is the slot of this rank that the peer fills. `to` is the slot of the peer
    // that this rank fills. Thread block b uses the flags from index b * (num_ranks() -
    // 1) on.
    const int from = (rank_ - peer + num_ranks()) % num_ranks() - 1;
    const int to = (peer - rank_ + num_ranks()) % num_ranks() - 1;
    const PeerSlot slot = {peer, from, reason.chunk};
    params.peers[params.num_peers++] = {
        .announcement = LineOf(addresses_[peer].announced, rank_),
        .to = SlotOf(peer, to),
        .signal = LineOf(addresses_[peer].arrived, to),
        .freed =
            FlagOf(LineOf(addresses_[rank_].freed, peer), slot, ErrorRecord::kNoSlot),
        .from = SlotOf(rank_, from),
        .arrived = FlagOf(LineOf(addresses_[rank_].arrived, from), slot, from)};
  }
  stream_.all_reduce->Run(stream_.stream, params);
}

void CudaSlots::SumByMulticast(const MulticastRange& range) {
  const int64_t size_bytes = range.num_elements * SizeOf(range.dtype);
  const int64_t vectors = (size_bytes + kMulticastBytes - 1) / kMulticastBytes;
  MulticastSumParams params = {};
  params.own = words_;
  params.data = slots_.multicast + range.offset;
  params.begin = rank_ * vectors / num_ranks();
  params.end = (rank_ + 1) * vectors / num_ranks();
  params.num_elements = range.num_elements;
  params.dtype = range.dtype;
  params.num_addends = static_cast<uint32_t>(range.addends.size());
  std::copy(range.addends.begin(), range.addends.end(), params.addends);
  stream_.multicast->Sum(stream_.stream, params, stream_.copies.num_sm);
}

}  // namespace jax_ub
