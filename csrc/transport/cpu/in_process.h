// Ranks that are threads of one process: the areas are plain memory.
#pragma once

#include <cstdint>
#include <exception>
#include <memory>
#include <vector>

#include "transport/cpu/peer_status.h"
#include "transport/cpu/slots.h"
#include "transport/transport.h"

namespace jax_ub {

class InProcessCommunicator {
 public:
  // `first_epoch` is where the epochs begin; tests let them wrap around.
  InProcessCommunicator(int num_ranks,
                        int num_slots,
                        int64_t slot_bytes,
                        uint32_t first_epoch = 0);
  InProcessCommunicator(const InProcessCommunicator&) = delete;
  InProcessCommunicator& operator=(const InProcessCommunicator&) = delete;

  int num_ranks() const { return static_cast<int>(areas_.size()); }
  int num_slots() const { return num_slots_; }
  int64_t slot_bytes() const { return slot_bytes_; }
  int64_t size_bytes() const { return num_ranks() * num_slots_ * slot_bytes_; }

  // The end of a rank; lives as long as the communicator.
  Transport& rank(int rank) { return *ends_[rank]; }

  // Fails every wait of every rank from now on; the first reason holds.
  void Poison(const std::exception_ptr& reason);

 private:
  const int num_slots_;
  const int64_t slot_bytes_;
  std::unique_ptr<std::byte[]> memory_;    // [rank][slot][slot_bytes]
  std::unique_ptr<SlotFlags[]> flags_;     // [rank][slot]
  std::unique_ptr<Doorbell[]> doorbells_;  // [rank]
  std::vector<RankMemory> areas_;          // [rank]
  PeerStatus peer_status_;
  std::vector<std::unique_ptr<SlotTransport>> ends_;  // [rank]
};

}  // namespace jax_ub
