// The Transport of a rank on a GPU, for one call. It never blocks the host: it enqueues
// copies and flag kernels on one stream. The kernels compare flags with an epoch in
// device memory, so that a captured CUDA graph can be replayed. A flag consists of an
// epoch and the tag of a call site (flag_params.h):
//
//   e = *epoch: the number of calls that this rank has ended, and the tag of the last
//   c = (epoch of e) + 1, and the tag of this call
//   first wait           announced[own rank] = c at every peer
//   Signal(peer, slot)   peer's arrived[slot] = c
//   Wait(slot)           own arrived[slot] == c
//   EndCall              freed[own rank] = c at every peer, then *epoch = c
//   WaitFree(peer)       own freed[peer] == e: the peer has ended its previous call
//
// To save launches, signals are sent by the kernel of the next wait, before it waits,
// and the end of a call is enqueued by Finish or with the first wait of the next call.
//
// In every call, each rank needs data of all other ranks. A rank writes into a peer's
// slots for the next call only after the peer has ended this call. Therefore a flag is
// never ahead of the value that a wait expects, consecutive calls may use the same
// slots, and Release has nothing to do. A wait fails if the peer has announced a
// different call with the same epoch. tests/csrc/cuda/protocol_test.cc proves these
// properties.
#pragma once

#include <cuda.h>

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "platform/cuda/driver.h"
#include "reduce/cuda/row_copies.h"
#include "reduce/cuda/sum_kernels.h"
#include "transport/cuda/all_reduce_kernel.h"
#include "transport/cuda/flag_kernels.h"
#include "transport/cuda/multicast_kernels.h"
#include "transport/transport.h"

namespace jax_ub {

// The offset of each slot from RankSlotAddress::slots is a multiple of this.
inline constexpr int64_t kSlotAlignment = 256;

// The addresses of the parts of a rank's heap (heap.h), valid on the device of the rank
// that uses them.
struct RankSlotAddress {
  CUdeviceptr slots = 0;      // the first slot
  CUdeviceptr arrived = 0;    // flags indexed by slot
  CUdeviceptr freed = 0;      // flags indexed by peer
  CUdeviceptr announced = 0;  // flags indexed by peer
  CUdeviceptr epoch = 0;
  CUdeviceptr failed = 0;
  CUdeviceptr poison = 0;
};

// The slots of a call. On every rank they start at RankSlotAddress::slots and are
// CudaSlots::StrideOf(slot_bytes) apart.
struct SlotAddresses {
  int num_slots = 0;
  int64_t slot_bytes = 0;
  // The multicast address of the first slots of all ranks, which only multicast
  // instructions may use; 0: there is no multicast.
  CUdeviceptr multicast = 0;
};

// Identifies the call site of a call, in error records and in flags.
struct CallIds {
  uint32_t number = 0;  // CudaCommunicator::NumberOf, specific to this process
  uint32_t tag = 0;     // GpuCallSignature::tag, the same on every rank
};

// The stream and the kernels with which a rank enqueues its work. All pointers belong
// to the rank's device, are not owned, and must outlive the CudaSlots.
struct SlotStream {
  const Driver* driver = nullptr;
  const FlagKernels* flags = nullptr;
  const SumKernels* sums = nullptr;
  CUstream stream = nullptr;
  CopyMethod copies;
  const AllReduceKernel* all_reduce = nullptr;  // only for AllReduce
  // The multicast kernels; nullptr if the slots have no multicast address.
  const MulticastKernels* multicast = nullptr;
};

// Contiguous elements at the same offset from the first slot on all ranks.
struct MulticastRange {
  int64_t offset = 0;  // from the first slot, in bytes; a multiple of kMulticastBytes
  int64_t num_elements = 0;
  DType dtype = DType::kF32;
  std::vector<SumAddend> addends;  // at most kMaxSumAddends
};

// Contiguous elements: this rank's partial sums, and the sums over all ranks.
struct AllReduceSum {
  const std::byte* partial = nullptr;
  DType dtype = DType::kF32;
  int64_t num_elements = 0;
  std::vector<SumAddend> addends;  // at most kMaxSumAddends
  std::byte* out = nullptr;
  DType out_dtype = DType::kF32;
};

class CudaSlots : public Transport {
 public:
  // `addresses` is indexed by rank and must outlive the object. `error` is the device
  // address of this rank's ErrorRecord.
  CudaSlots(int rank,
            std::span<const RankSlotAddress> addresses,
            CUdeviceptr error,
            const CallIds& call,
            const SlotAddresses& slots,
            const SlotStream& stream);

  // Enqueues a check that this rank runs the partition of the program that it was
  // lowered for: unless the u32 at `partition` is `expected`, the rank fails on the
  // device, and with it all its peers. Called before all other methods, for exported
  // programs, which may run on other devices or in another device order than they were
  // lowered for.
  void CheckPartition(CUdeviceptr partition, uint32_t expected);

  // Returns the distance between slots in the heap: `slot_bytes`, rounded up.
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
  // Waits only for the first slot of each peer in a call: the peer frees all its slots
  // at once.
  void WaitAllFree(std::span<const PeerSlot> slots, const WaitReason& reason) override;
  // The caller must first make the stream wait for all work that reads a slot.
  void EndCall() override;
  // Enqueues the end of the last call, which fills the results with NaN if the rank has
  // failed. Called after all work that writes the results.
  void Finish(std::span<const NanFill::Result> results);

  // Enqueues one kernel that all-reduces `sum`, see all_reduce_params.h. Rank r
  // receives the partial sums of rank r - d (modulo P) in its slot d - 1. The call must
  // not communicate in any other way.
  void AllReduce(const AllReduceSum& sum, const WaitReason& reason);

  // Sums this rank's part of the elements over all ranks, adds the addends, and stores
  // the sums on every rank. Works on vectors of kMulticastBytes, so bytes after the
  // last element may change too.
  void SumByMulticast(const MulticastRange& range);

 private:
  CUdeviceptr SlotOf(int rank, int slot) const;
  PeerWords PoisonsOfPeers() const;
  WaitingCall WaitingCallOf(double timeout_s) const;
  // Enqueues a kernel that sends the pending signals and then waits for `flags`, which
  // are in this rank's memory. `ahead` is WaitParams::ahead.
  void WaitFor(std::span<const AwaitedFlag> flags, bool ahead, double timeout_s);
  // Enqueues kernels that send pending signals, until only `num_left` are pending. The
  // kernel of the next wait sends these.
  void SendSignals(size_t num_left);
  AwaitedFlag FlagOf(CUdeviceptr flag, const PeerSlot& slot, uint32_t slot_index) const;

  const int rank_;
  const std::span<const RankSlotAddress> addresses_;
  const RankWords words_;
  const CallIds call_;
  const SlotAddresses slots_;
  const SlotStream stream_;
  // Indexed by peer: whether this call has waited until the peer's slots are free.
  std::vector<bool> is_free_;
  bool is_announced_ = false;  // whether a wait has announced this call to the peers
  std::vector<FlagTarget> signals_;  // that have not been sent
  bool has_ended_ = false;           // whether the end of a call is not enqueued yet
};

}  // namespace jax_ub
