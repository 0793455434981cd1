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

CUdeviceptr AddressOf(const std::byte* data) {
  return reinterpret_cast<CUdeviceptr>(data);
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
  const int64_t size_bytes = rows.num_rows * rows.row_bytes;
  if (size_bytes > slots_.slot_bytes) {
    throw Error("jax_ub: a piece of " + std::to_string(size_bytes) +
                " bytes does not fit into a slot of " +
                std::to_string(slots_.slot_bytes));
  }
  EnqueueCopy(*stream_.driver, *stream_.sums, stream_.stream,
              {.from = AddressOf(rows.data),
               .to = SlotOf(peer, slot),
               .num_rows = rows.num_rows,
               .row_bytes = rows.row_bytes,
               .from_stride = rows.stride_bytes,
               .to_stride = rows.row_bytes,
               .unit_bytes = 0},
              stream_.copies);
}

void CudaSlots::Signal(int peer, int slot) {
  SignalParams params = ParamsOfSignal();
  params.num_targets = 1;
  params.targets[0] = {LineOf(addresses_[peer].arrived, slot), addresses_[peer].poison};
  stream_.flags->Signal(stream_.stream, params);
}

SignalParams CudaSlots::ParamsOfSignal() const {
  SignalParams params = {};
  params.own = words_;
  params.rank = rank_;
  params.call = call_.number;
  params.tag = call_.tag;
  return params;
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

WaitParams CudaSlots::ParamsOfWait(int peer, int slot, const WaitReason& reason) {
  WaitParams params = {};
  params.own = words_;
  params.announced = LineOf(addresses_[rank_].announced, peer);
  params.tag = call_.tag;
  params.timeout_ns = static_cast<uint64_t>(std::max(reason.timeout_s, 0.0) * 1e9);
  params.what.rank = rank_;
  params.what.peer = peer;
  params.what.slot = slot;
  params.what.chunk = reason.chunk;
  params.what.call = call_.number;
  params.peers = PoisonsOfPeers();
  if (is_announced_) return params;
  is_announced_ = true;
  for (int other = 0; other < num_ranks(); ++other) {
    if (other == rank_) continue;
    params.signatures.words[params.signatures.num_peers++] =
        LineOf(addresses_[other].announced, rank_);
  }
  return params;
}

void CudaSlots::Wait(int peer, int slot, const WaitReason& reason) {
  WaitParams params = ParamsOfWait(peer, slot, reason);
  params.flag = LineOf(addresses_[rank_].arrived, slot);
  params.ahead = 1;
  stream_.flags->Wait(stream_.stream, params);
}

void CudaSlots::WaitFree(int peer, int, const WaitReason& reason) {
  if (is_free_[peer]) return;
  is_free_[peer] = true;
  WaitParams params = ParamsOfWait(peer, ErrorRecord::kNoSlot, reason);
  params.flag = LineOf(addresses_[rank_].freed, peer);
  params.ahead = 0;
  stream_.flags->Wait(stream_.stream, params);
}

void CudaSlots::EndCall() {
  SignalParams params = ParamsOfSignal();
  for (int peer = 0; peer < num_ranks(); ++peer) {
    if (peer == rank_) continue;
    params.targets[params.num_targets++] = {LineOf(addresses_[peer].freed, rank_),
                                            addresses_[peer].poison};
  }
  stream_.flags->End(stream_.stream, params);
  is_free_.assign(is_free_.size(), false);
  is_announced_ = false;
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

void CudaSlots::FillNan(std::span<const NanFillParams::Result> results) {
  while (!results.empty()) {
    NanFillParams params = {};
    params.own = words_;
    params.num_results =
        static_cast<uint32_t>(std::min<size_t>(results.size(), kMaxResults));
    std::copy_n(results.begin(), params.num_results, params.results);
    stream_.flags->FillNan(stream_.stream, params);
    results = results.subspan(params.num_results);
  }
}

}  // namespace jax_ub
