// The Transport of a rank on a GPU, for one call. It never blocks the host: it enqueues
// copies and flag kernels on one stream. The kernels compare flags with an epoch in
// device memory, so that a captured CUDA graph can be replayed. A flag consists of an
// epoch (a call number) and the tag of a call site (flag_params.h):
//
//   e = *epoch: the number of calls that this rank has ended, and the tag of the last
//   c = (epoch of e) + 1, and the tag of this call
//   first wait           announced[own rank] = c at every peer
//   Signal(peer, slot)   peer's arrived[slot] = c
//   Wait(slot)           own arrived[slot] == c
//   EndCall              freed[own rank] = c at every peer, then *epoch = c
//   WaitFree(peer)       own freed[peer] == e: the peer has ended its previous call
#pragma once

#include <cuda.h>

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "platform/cuda/driver.h"
#include "reduce/cuda/sum_kernels.h"
#include "transport/cuda/all_reduce_kernel.h"
#include "transport/cuda/flag_kernels.h"
#include "transport/cuda/multicast_kernels.h"
#include "transport/transport.h"

namespace jax_ub {

// Slots are aligned to this many bytes, relative to RankSlotAddress::slots.
inline constexpr int64_t kSlotAlignment = 256;

// Addresses of the parts of one rank's heap (heap.h). They are valid on the device of
// the rank that uses them.
struct RankSlotAddress {
  CUdeviceptr slots = 0;      // the first slot
  CUdeviceptr arrived = 0;    // flags indexed by slot
  CUdeviceptr freed = 0;      // flags indexed by peer
  CUdeviceptr announced = 0;  // flags indexed by peer
  CUdeviceptr epoch = 0;
  CUdeviceptr failed = 0;
  CUdeviceptr poison = 0;
};

// The slots of a call. On every rank, slot i is at RankSlotAddress::slots + i *
// CudaSlots::StrideOf(slot_bytes).
struct SlotAddresses {
  int num_slots = 0;
  int64_t slot_bytes = 0;
  // Multicast address of the first slot of all ranks. Only multicast instructions may
  // use it. 0: there is no multicast.
  CUdeviceptr multicast = 0;
};

// The numbers that identify a call site: `number` in error records, `tag` in flags.
struct CallIds {
  uint32_t number = 0;  // CudaCommunicator::NumberOf, specific to this process
  uint32_t tag = 0;     // GpuCallSignature::tag, the same on every rank
};

// The stream on which a rank enqueues its work, and the kernels that it launches. The
// pointers are not owned and must outlive the CudaSlots.
struct SlotStream {
  const Driver* driver = nullptr;
  const FlagKernels* flags = nullptr;
  const SumKernels* sums = nullptr;
  CUstream stream = nullptr;
  CopyMethod copies;
  const AllReduceKernel* all_reduce = nullptr;  // only for AllReduce
  // The kernels of SumByMulticast; null if the slots have no multicast address.
  const MulticastKernels* multicast = nullptr;
};

// The elements that SumByMulticast sums. They are contiguous and have the same offset
// in the slots of every rank.
struct MulticastRange {
  int64_t offset = 0;  // from the first slot, in bytes; a multiple of kMulticastBytes
  int64_t num_elements = 0;
  DType dtype = DType::kF32;
  std::vector<SumAddend> addends;  // at most kMaxSumAddends
};

// The operands of an all-reduce that runs as one kernel: this rank's contiguous partial
// sums, and the result.
struct AllReduceSum {
  const std::byte* partial = nullptr;
  DType dtype = DType::kF32;
  int64_t num_elements = 0;
  std::vector<SumAddend> addends;  // at most kMaxSumAddends
  std::byte* out = nullptr;
  DType out_dtype = DType::kF32;
};

// Implements Transport with slots and flags in device memory. In every call, each rank
// needs data of all other ranks. It writes into a peer's slots for the next call only
// after the peer has ended this call. Therefore a flag never has a later epoch than the
// wait for it expects, consecutive calls may use the same slots, and Release does
// nothing. A wait fails if the peer has announced a different call with the same epoch.
// tests/csrc/cuda/protocol_test.cc proves these properties.
//
// To save kernel launches, the kernel of the next wait also sends the pending signals.
// The end of a call is enqueued by Finish or by the first wait of the next call.
class CudaSlots : public Transport {
 public:
  // `addresses` has the addresses of each rank's heap, indexed by rank. It must outlive
  // the object. `error` is the device address of the rank's ErrorRecord.
  CudaSlots(int rank,
            std::span<const RankSlotAddress> addresses,
            CUdeviceptr error,
            const CallIds& call,
            const SlotAddresses& slots,
            const SlotStream& stream);

  // Enqueues a check that the u32 at `partition` is `expected`. If it is not, the call
  // fails on this rank and on all its peers. Must be called before all other methods.
  // An exported program needs this check, because it may run on other devices, or on
  // the devices in another order, than it was lowered for.
  void CheckPartition(CUdeviceptr partition, uint32_t expected);

  // Returns the distance between slots in the heap, in bytes: `slot_bytes` rounded up.
  static int64_t StrideOf(int64_t slot_bytes);

  int rank() const override { return rank_; }
  int num_ranks() const override { return static_cast<int>(addresses_.size()); }
  // Returns the device address of a slot of this rank.
  const std::byte* slot(int index) const override;

  void Write(int peer, int slot, const Rows& rows) override;
  void Signal(int peer, int slot) override;
  void Wait(int peer, int slot, const WaitReason& reason) override;
  void WaitAll(std::span<const PeerSlot> slots, const WaitReason& reason) override;
  void Release(int slot) override {}
  void WaitFree(int peer, int slot, const WaitReason& reason) override;
  // Waits for only one slot of each peer per call, because a peer frees all its slots
  // together.
  void WaitAllFree(std::span<const PeerSlot> slots, const WaitReason& reason) override;
  // Before EndCall, the caller must make the stream wait for all work that reads a
  // slot, because the peers may overwrite the slots afterwards.
  void EndCall() override;
  // Enqueues the end of the call, which frees this rank's slots for its peers. If the
  // rank has failed, it fills `results` with NaN instead. Must be called after all work
  // that writes the results has been enqueued.
  void Finish(std::span<const NanFill::Result> results);

  // Enqueues one kernel that all-reduces `sum` (all_reduce_params.h). It must be the
  // only communication of the call. With P ranks, slot d - 1 of rank r receives the
  // partial sums of rank (r - d) modulo P.
  void AllReduce(const AllReduceSum& sum, const WaitReason& reason);

  // Sums a part of `range` over all ranks, adds the addends, and stores the sums on
  // every rank. Each rank sums a different part of about 1 / num_ranks() of the
  // elements. The kernel processes vectors of kMulticastBytes, so it may also change
  // bytes after the last element.
  void SumByMulticast(const MulticastRange& range);

 private:
  CUdeviceptr SlotOf(int rank, int slot) const;
  PeerWords PoisonsOfPeers() const;
  WaitingCall WaitingCallOf(double timeout_s) const;
  // Enqueues a kernel that sends the pending signals, then waits for `flags` in this
  // rank's memory. If `ahead` is true, it waits until the peers have filled slots in
  // this call. If `ahead` is false, it waits until the peers have ended their previous
  // call.
  void WaitFor(std::span<const AwaitedFlag> flags, bool ahead, double timeout_s);
  // Enqueues kernels that send pending signals until at most `num_left` signals remain.
  // The kernel of the next wait can send the remaining signals.
  void SendSignals(size_t num_left);
  AwaitedFlag FlagOf(CUdeviceptr flag, const PeerSlot& slot, uint32_t slot_index) const;

  const int rank_;
  const std::span<const RankSlotAddress> addresses_;
  const RankWords words_;
  const CallIds call_;
  const SlotAddresses slots_;
  const SlotStream stream_;
  // Whether this call has already waited until the peer's slots are free. Indexed by
  // peer.
  std::vector<bool> is_free_;
  bool is_announced_ = false;  // whether a wait has announced this call to the peers
  std::vector<FlagTarget> signals_;  // that have not been sent
  bool has_ended_ = false;           // whether the end of a call is not enqueued yet
};

}  // namespace jax_ub
