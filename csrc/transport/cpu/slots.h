// The Transport of the CPU: slots in memory that all ranks can access. It serves
// threads of one process (in_process.h) and processes that share memory
// (shared_memory.h).
#pragma once

#include <atomic>
#include <cstdint>
#include <string>
#include <vector>

#include "transport/cpu/doorbell.h"
#include "transport/cpu/peer_status.h"
#include "transport/transport.h"

namespace jax_ub {

// The state of one slot (receive buffer). `arrived` and `released` are epochs (use
// counts) of the slot: the last one whose data has arrived, and the last one that was
// released. Each slot has its own cache line, because a rank spins on its flags while
// other ranks write the flags of other slots.
struct alignas(64) SlotFlags {
  std::atomic<uint32_t> arrived{0};
  std::atomic<uint32_t> released{0};
};

// The doorbell, the slot flags and the buffers of one rank, at their addresses in this
// process.
struct RankMemory {
  Doorbell* doorbell = nullptr;
  SlotFlags* flags = nullptr;  // indexed by slot
  // Start of the rank's buffers. The offset of SlotTransport::SetLayout is relative to
  // it.
  std::byte* memory = nullptr;
  int process = 0;
  std::string name;  // "rank 1 (process 0, pid 12)"
};

// The Transport of one rank. All calls of the rank use the same object, because the
// epochs of the slots continue from call to call.
class SlotTransport : public Transport {
 public:
  // `areas` has the memory of every rank, indexed by rank. `areas` and `peer_status`
  // must outlive the transport.
  SlotTransport(int rank,
                const std::vector<RankMemory>& areas,
                const PeerStatus& peer_status,
                uint32_t first_epoch);

  // Returns the distance between two slots: their size rounded up to whole cache lines,
  // so that no cache line contains parts of two slots.
  static int64_t StrideOf(int64_t slot_bytes) {
    constexpr int64_t kAlignment = 64;
    return (slot_bytes + kAlignment - 1) / kAlignment * kAlignment;
  }

  // Sets the addresses of the slots for the next calls. Slot i of every rank is at
  // `offset` + i * `slot_bytes` in the rank's memory. `slot_bytes` must be a result of
  // StrideOf. All ranks must pass the same values. The address of a slot may change
  // between calls, because its epoch depends only on its index.
  void SetLayout(int64_t offset, int num_slots, int64_t slot_bytes);

  int rank() const override { return rank_; }
  int num_ranks() const override { return static_cast<int>(areas_.size()); }
  const std::byte* slot(int index) const override { return SlotOf(rank_, index); }

  void Write(int peer, int slot, const Rows& rows) override;
  void Signal(int peer, int slot) override;
  void Wait(int peer, int slot, const WaitReason& reason) override;
  void Release(int slot) override;
  void WaitFree(int peer, int slot, const WaitReason& reason) override;
  void EndCall() override;

 private:
  struct SlotUse {
    uint32_t epoch = 0;     // the number of calls that used this slot index
    bool put = false;       // this rank filled a peer's slot in this call
    bool received = false;  // this rank's slot was filled or released in this call
  };

  std::byte* SlotOf(int rank, int index) const {
    return areas_[rank].memory + offset_ + index * slot_bytes_;
  }
  std::string NameOf(int rank) const {
    return areas_[rank].name + peer_status_.DescribeState(areas_[rank].process);
  }
  template <typename What>
  void WaitFor(const std::atomic<uint32_t>& flag,
               uint32_t epoch,
               int peer,
               const WaitReason& reason,
               const What& what);

  const int rank_;
  const std::vector<RankMemory>& areas_;
  const PeerStatus& peer_status_;
  const uint32_t first_epoch_;
  std::vector<SlotUse> uses_;  // indexed by slot
  int64_t offset_ = 0;
  int64_t slot_bytes_ = 0;
};

}  // namespace jax_ub
