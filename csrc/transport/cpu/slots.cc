#include "transport/cpu/slots.h"

#include <cstring>

#include "platform/error.h"

namespace jax_ub {

namespace {

bool IsReached(const std::atomic<uint32_t>& flag, uint32_t epoch) {
  return static_cast<int32_t>(flag.load() - epoch) >= 0;
}

std::string ChunkOf(const WaitReason& reason) {
  if (reason.chunk < 0) return "all rows";
  return "chunk " + std::to_string(reason.chunk);
}

}  // namespace

SlotTransport::SlotTransport(int rank,
                             const std::vector<RankMemory>& areas,
                             const PeerStatus& peer_status,
                             uint32_t first_epoch)
    : rank_(rank),
      areas_(areas),
      peer_status_(peer_status),
      first_epoch_(first_epoch) {}

void SlotTransport::SetLayout(int64_t offset, int num_slots, int64_t slot_bytes) {
  offset_ = offset;
  slot_bytes_ = slot_bytes;
  // The epoch (use count) of a new slot begins with first_epoch_, like the flags of the
  // slot on all ranks.
  if (static_cast<size_t>(num_slots) > uses_.size()) {
    uses_.resize(num_slots, SlotUse{first_epoch_, false, false});
  }
}

void SlotTransport::Write(int peer, int slot, const Rows& rows) {
  const int64_t size_bytes = rows.slot_offset + rows.num_rows * rows.row_bytes;
  if (size_bytes > slot_bytes_) {
    throw Error("jax_ub: a split of " + std::to_string(size_bytes) +
                " bytes does not fit into a slot of " + std::to_string(slot_bytes_));
  }
  std::byte* to = SlotOf(peer, slot) + rows.slot_offset;
  for (int64_t row = 0; row < rows.num_rows; ++row) {
    std::memcpy(to + row * rows.row_bytes, rows.data + row * rows.stride_bytes,
                rows.row_bytes);
  }
}

// The store of `arrived` is a release that publishes the data of Write. The load of
// `arrived` in the peer's Wait is the matching acquire.
void SlotTransport::Signal(int peer, int slot) {
  uses_[slot].put = true;
  areas_[peer].flags[slot].arrived.store(uses_[slot].epoch + 1);
  Ring(*areas_[peer].doorbell);
}

void SlotTransport::Wait(int peer, int slot, const WaitReason& reason) {
  uses_[slot].received = true;
  WaitFor(areas_[rank_].flags[slot].arrived, uses_[slot].epoch + 1, peer, reason,
          [&] { return ChunkOf(reason) + " of " + NameOf(peer); });
}

// The store of `released` comes after this rank's reads of the slot. The next rank that
// writes the slot first loads `released` in WaitFree, so it does not overwrite data
// that this rank has not read yet.
void SlotTransport::Release(int slot) {
  uses_[slot].received = true;
  areas_[rank_].flags[slot].released.store(uses_[slot].epoch + 1);
  // The doorbells of all ranks are rung, because any rank may write the slot next.
  for (const RankMemory& area : areas_) Ring(*area.doorbell);
}

void SlotTransport::WaitFree(int peer, int slot, const WaitReason& reason) {
  const uint32_t epoch = uses_[slot].epoch + (uses_[slot].put ? 1 : 0);
  WaitFor(areas_[peer].flags[slot].released, epoch, peer, reason,
          [&] { return NameOf(peer) + " to release the slot of " + ChunkOf(reason); });
}

void SlotTransport::EndCall() {
  for (SlotUse& use : uses_) {
    if (use.put || use.received) ++use.epoch;
    use.put = use.received = false;
  }
}

template <typename What>
void SlotTransport::WaitFor(const std::atomic<uint32_t>& flag,
                            uint32_t epoch,
                            int peer,
                            const WaitReason& reason,
                            const What& what) {
  const int process = areas_[peer].process;
  peer_status_.Await(
      *areas_[rank_].doorbell, reason, [&] { return IsReached(flag, epoch); },
      [&] { return peer_status_.IsLost(process) ? process : PeerStatus::kNoProcess; },
      [&] { return WaitDescription{areas_[rank_].name, what()}; });
}

}  // namespace jax_ub
