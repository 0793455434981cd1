// Slots in device memory: a rank's end of a communicator, for one call. It waits for
// nothing itself: everything is enqueued on one stream, as copies and as kernels that
// compare flags with an epoch in device memory, so that a captured graph can be replayed.
// A flag is an epoch and the tag of a call site (flag_params.h):
//
//   e = *epoch, the calls that this rank has ended, and the tag of the last one
//   c = (epoch of e) + 1, tag of this call
//   first wait           announced[own rank] = c at every peer
//   Signal(peer, slot)   peer's arrived[slot] = c
//   Wait(slot)           own arrived[slot] == c
//   EndCall              freed[own rank] = c at every peer, then *epoch = c
//   WaitFree(peer)       own freed[peer] == e: the peer has ended its previous call
//
// A rank that has ended c needed data of every other rank for it, and puts none into the
// slots of a peer before that has ended c, too. So flags are never ahead of a wait, the
// slots of a call may lie where they like, whatever the one before had there, and a release
// has nothing to do. A wait whose peer has announced another call of this epoch fails.
// tests/csrc/cuda/protocol_test.cc proves it.
#pragma once

#include <cuda.h>

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "platform/cuda/driver.h"
#include "reduce/cuda/row_copies.h"
#include "reduce/cuda/sum_kernels.h"
#include "transport/cuda/flag_kernels.h"
#include "transport/cuda/multicast_kernels.h"
#include "transport/transport.h"

namespace jax_ub {

// From one flag to the next.
inline constexpr int64_t kFlagLineBytes = 128;

// Slots begin at multiples of this behind RankSlotAddress::slots.
inline constexpr int64_t kSlotAlignment = 256;

// What a rank has in its heap, at the addresses by which this rank's device reaches it.
struct RankSlotAddress {
  CUdeviceptr slots = 0;      // bytes, of all slots
  CUdeviceptr arrived = 0;    // [slot]
  CUdeviceptr freed = 0;      // [peer]
  CUdeviceptr announced = 0;  // [peer]
  CUdeviceptr epoch = 0;
  CUdeviceptr failed = 0;
  CUdeviceptr poison = 0;
};

// The slots of a call, on every rank: CudaSlots::StrideOf(slot_bytes) each.
struct SlotAddresses {
  int num_slots = 0;
  int64_t slot_bytes = 0;
  // What stands for the first slot of every rank: for multicast instructions alone. 0:
  // nothing does.
  CUdeviceptr multicast = 0;
};

// Which call it is: tells flags and errors of call sites apart.
struct CallIds {
  uint32_t number = 0;  // the host's, of the call site
  uint32_t tag = 0;     // GpuCallSignature::tag, the same on every rank
};

// What a rank enqueues with: all of its device, and kept by somebody else.
struct SlotStream {
  const Driver* driver = nullptr;
  const FlagKernels* flags = nullptr;
  const SumKernels* sums = nullptr;
  CUstream stream = nullptr;
  CopyMethod copies;
  const MulticastKernels* multicast = nullptr;  // where the slots have such an address
};

// Elements that lie alike in the slots of all ranks, from `offset` behind the first slot.
struct MulticastRange {
  int64_t offset = 0;  // in bytes: a multiple of kMulticastBytes
  int64_t num_elements = 0;
  DType dtype = DType::kF32;
  std::vector<MulticastAddend> addends;  // at most kMaxMulticastAddends
};

class CudaSlots : public Transport {
 public:
  // `places` [rank] outlive it. `error` is the own ErrorRecord's device address.
  CudaSlots(int rank,
            std::span<const RankSlotAddress> places,
            CUdeviceptr error,
            const CallIds& call,
            const SlotAddresses& slots,
            const SlotStream& stream);

  // Before all else of a call that may run on other devices than it was meant for, or on
  // the same in another order: the rank, and so all its peers, fail on the device unless
  // the u32 at `partition` is `expected`.
  void CheckPartition(CUdeviceptr partition, uint32_t expected);

  // What a slot takes in the heap.
  static int64_t StrideOf(int64_t slot_bytes);

  int rank() const override { return rank_; }
  int num_ranks() const override { return static_cast<int>(places_.size()); }
  // A device address.
  const std::byte* slot(int index) const override;

  void Write(int peer, int slot, const Rows& rows) override;
  void Signal(int peer, int slot) override;
  void Wait(int peer, int slot, const WaitReason& reason) override;
  void Release(int slot) override {}
  // Enqueues nothing but for the first slot of each peer.
  void WaitFree(int peer, int slot, const WaitReason& reason) override;
  // The stream has to be behind everything that read a slot.
  void EndCall() override;

  // This rank's share of the elements: becomes at every rank their sum over all ranks, with
  // the addends. Whole vectors, so that bytes behind the last element change, too.
  void SumByMulticast(const MulticastRange& range);

  // Behind everything that writes the results: fills them with NaN if the rank failed.
  void FillNan(std::span<const NanFillParams::Result> results);

 private:
  CUdeviceptr SlotOf(int rank, int slot) const;
  PeerWords PoisonsOfPeers() const;
  SignalParams ParamsOfSignal() const;
  WaitParams ParamsOfWait(int peer, int slot, const WaitReason& reason);

  const int rank_;
  const std::span<const RankSlotAddress> places_;
  const RankWords words_;
  const CallIds call_;
  const SlotAddresses slots_;
  const SlotStream stream_;
  std::vector<bool> is_free_;  // [peer]: waited for in this call
  bool is_announced_ = false;  // this call
};

}  // namespace jax_ub
