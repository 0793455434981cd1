// Slots in rank areas: the one transport of the CPU, wherever the areas' memory comes
// from.
#pragma once

#include <atomic>
#include <cstdint>
#include <string>
#include <vector>

#include "transport/cpu/doorbell.h"
#include "transport/cpu/peer_status.h"
#include "transport/transport.h"

namespace jax_ub {

// The epochs of one slot. On a cache line of its own: a rank spins on it while another
// one writes its own.
struct alignas(64) SlotFlags {
  std::atomic<uint32_t> arrived{0};
  std::atomic<uint32_t> released{0};
};

// What all ranks see of one.
struct RankMemory {
  Doorbell* doorbell = nullptr;
  SlotFlags* flags = nullptr;   // [slot]
  std::byte* memory = nullptr;  // what the slots' offsets count from
  int process = 0;
  std::string name;  // "rank 1 (process 0, pid 12)"
};

// A rank's end of a communicator. Its epochs count on from call to call.
class SlotTransport : public Transport {
 public:
  // `areas` [rank] and `fate` outlive it.
  SlotTransport(int rank,
                const std::vector<RankMemory>& areas,
                const PeerStatus& peer_status,
                uint32_t first_epoch);

  // What a slot takes: slots begin on cache lines of their own.
  static int64_t StrideOf(int64_t slot_bytes) {
    constexpr int64_t kAlignment = 64;
    return (slot_bytes + kAlignment - 1) / kAlignment * kAlignment;
  }

  // Where the slots lie from now on, in every rank's memory: num_slots of slot_bytes
  // each, a stride, behind `offset`. All ranks agree. Epochs belong to slot numbers, not
  // places.
  void Place(int64_t offset, int num_slots, int64_t slot_bytes);

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
    uint32_t epoch = 0;     // calls that used this slot number
    bool put = false;       // in this call: a peer's
    bool received = false;  // in this call: the own
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
  std::vector<SlotUse> uses_;  // [slot]
  int64_t offset_ = 0;
  int64_t slot_bytes_ = 0;
};

}  // namespace jax_ub
