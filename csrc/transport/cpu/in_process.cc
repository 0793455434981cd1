#include "transport/cpu/in_process.h"

#include <string>

namespace jax_ub {

InProcessCommunicator::InProcessCommunicator(int num_ranks,
                                             int num_slots,
                                             int64_t slot_bytes,
                                             uint32_t first_epoch)
    : num_slots_(num_slots),
      slot_bytes_(SlotTransport::StrideOf(slot_bytes)),
      memory_(new std::byte[num_ranks * num_slots * slot_bytes_]),
      flags_(new SlotFlags[num_ranks * num_slots]),
      doorbells_(new Doorbell[num_ranks]),
      areas_(num_ranks),
      peer_status_({{.name = "this process"}}) {
  for (int r = 0; r < num_ranks; ++r) {
    areas_[r] = {.doorbell = &doorbells_[r],
                 .flags = &flags_[r * num_slots],
                 .memory = memory_.get() + r * num_slots * slot_bytes_,
                 .process = 0,
                 .name = "rank " + std::to_string(r)};
    for (int slot = 0; slot < num_slots; ++slot) {
      areas_[r].flags[slot].arrived.store(first_epoch);
      areas_[r].flags[slot].released.store(first_epoch);
    }
    ends_.push_back(
        std::make_unique<SlotTransport>(r, areas_, peer_status_, first_epoch));
    ends_.back()->SetLayout(0, num_slots, slot_bytes_);
  }
}

void InProcessCommunicator::Poison(const std::exception_ptr& reason) {
  peer_status_.Poison(reason);
  for (const RankMemory& area : areas_) Ring(*area.doorbell);
}

}  // namespace jax_ub
