// A communicator whose ranks are all threads of one process. Its slots are in ordinary
// process memory.
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
  // `first_epoch` is the initial epoch (use count) of every slot. Tests pass a large
  // value, so that the epochs overflow.
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

  // Returns the transport through which `rank` sends and receives. It is valid as long
  // as this object exists.
  Transport& rank(int rank) { return *ends_[rank]; }

  // Makes all pending and later waits of all ranks fail with `reason`. Only the first
  // call has an effect.
  void Poison(const std::exception_ptr& reason);
  std::exception_ptr poison() const { return peer_status_.poison(); }

 private:
  const int num_slots_;
  const int64_t slot_bytes_;
  std::unique_ptr<std::byte[]> memory_;    // [rank][slot][slot_bytes]
  std::unique_ptr<SlotFlags[]> flags_;     // [rank][slot]
  std::unique_ptr<Doorbell[]> doorbells_;  // [rank]
  std::vector<RankMemory> areas_;          // indexed by rank
  PeerStatus peer_status_;
  std::vector<std::unique_ptr<SlotTransport>> ends_;  // indexed by rank
};

}  // namespace jax_ub
