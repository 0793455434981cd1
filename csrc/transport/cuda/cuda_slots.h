// Slots in device memory: a rank's end of a communicator, for one call. It waits for
// nothing itself: everything is enqueued on one stream, as copies and as kernels that
// compare flags with an epoch in device memory, so that a captured graph can be replayed.
//
//   e = *epoch, the calls that this rank has ended
//   Signal(peer, slot)   peer's arrived[slot] = e + 1
//   Wait(slot)           own arrived[slot] >= e + 1
//   EndCall              freed[own rank] = e + 1 at every peer, then *epoch = e + 1
//   WaitFree(peer)       own freed[peer] >= e: the peer has ended its previous call
//
// So the slots of a call may lie where they like, whatever the one before had there; and
// a release has nothing to do. tests/csrc/cuda/protocol_test.cc proves it.
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

// Slots begin at multiples of this behind RankPlace::slots.
inline constexpr int64_t kSlotAlignment = 256;

// What a rank has in its heap, at the addresses by which this rank's device reaches it.
struct RankPlace {
  CUdeviceptr slots = 0;    // bytes, of all slots
  CUdeviceptr arrived = 0;  // [slot]
  CUdeviceptr freed = 0;    // [peer]
  CUdeviceptr epoch = 0;
  CUdeviceptr failed = 0;
  CUdeviceptr poison = 0;
};

// The slots of a call, on every rank: CudaSlots::StrideOf(slot_bytes) each.
struct SlotPlaces {
  int num_slots = 0;
  int64_t slot_bytes = 0;
  // What stands for the first slot of every rank: for multicast instructions alone. 0:
  // nothing does.
  CUdeviceptr multicast = 0;
};

// What a rank enqueues with: all of its device, and kept by somebody else.
struct SlotStream {
  const Driver* driver = nullptr;
  const FlagKernels* flags = nullptr;
  const SumKernels* sums = nullptr;
  CUstream stream = nullptr;
  CopyWay copies;
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
  // `places` [rank] outlive it. `error` is the own ErrorRecord's device address, `call`
  // the host's number of the call site, for the record.
  CudaSlots(int rank,
            std::span<const RankPlace> places,
            CUdeviceptr error,
            uint32_t call,
            const SlotPlaces& slots,
            const SlotStream& stream);

  // Before all else of a call that may run on other devices than it was meant for, or on
  // the same in another order: the rank, and so all its peers, fail on the device unless
  // the u32 at `partition` is `expected`.
  void CheckPlace(CUdeviceptr partition, uint32_t expected);

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
  void Spoil(std::span<const SpoilParams::Result> results);

 private:
  CUdeviceptr SlotOf(int rank, int slot) const;
  PeerPoisons PoisonsOfPeers() const;
  WaitParams ParamsOfWait(int peer, int slot, const WaitReason& reason) const;

  const int rank_;
  const std::span<const RankPlace> places_;
  const RankWords words_;
  const uint32_t call_;
  const SlotPlaces slots_;
  const SlotStream stream_;
  std::vector<bool> is_free_;  // [peer]: waited for in this call
};

}  // namespace jax_ub
