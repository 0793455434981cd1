// The interface through which a rank exchanges chunks with its peers. A Transport
// belongs to one rank of a communicator and is used by one thread at a time.
//
// Every rank has the same number of slots of the same size. In each call, a slot is
// either unused on all ranks, or it is filled by one put (Write and Signal) and emptied
// by one Release. Sender and receiver can therefore both count the slot's epoch: the
// number of calls that have used it. Epochs persist from call to call. They only grow,
// are compared by signed difference, and may wrap around.
//
// Memory order: data that a rank writes before Signal is visible to the peer after the
// peer's Wait, and the peer's reads before Release happen before WaitFree returns.
// Every wait ends in one of three ways: its condition holds; CommunicatorError as soon
// as a rank fails, with that rank's reason; or DeadlineError.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>

namespace jax_ub {

// A matrix of bytes to send. Each row is contiguous, but there may be gaps between
// rows, which are not sent.
struct Rows {
  const std::byte* data = nullptr;
  int64_t num_rows = 0;
  int64_t row_bytes = 0;
  int64_t stride_bytes = 0;
  int64_t slot_offset = 0;  // where the packed rows begin in a slot, in bytes
};

// The timeout of a wait, and the parts of the wait's error message.
struct WaitReason {
  const std::string& label;  // "all_gather_matmul (ub_name 'qkv_fprop')"
  int chunk = 0;             // -1: all rows, rather than one chunk
  double timeout_s = 0;
  // The environment variable that sets the timeout. The error message names it.
  std::string_view setting = "JAX_UB_TIMEOUT_S";
};

// A slot (receive buffer) through which this rank and `peer` exchange a chunk: a slot
// of this rank that `peer` fills, or a slot of `peer` that this rank fills.
struct PeerSlot {
  int peer = 0;
  int slot = 0;
  int chunk = 0;  // as in WaitReason
};

class Transport {
 public:
  virtual ~Transport() = default;

  virtual int rank() const = 0;
  virtual int num_ranks() const = 0;

  // Returns the data in this rank's slot. It may be read between Wait and Release.
  virtual const std::byte* slot(int index) const = 0;

  // Copies `rows` into the peer's slot, without the gaps between the rows. Must follow
  // WaitFree.
  virtual void Write(int peer, int slot, const Rows& rows) = 0;
  // Tells the peer that its slot is full, after all data of the slot have been written.
  virtual void Signal(int peer, int slot) = 0;

  // Waits until the peer has filled this rank's slot.
  virtual void Wait(int peer, int slot, const WaitReason& reason) = 0;
  // Waits until peers have filled several slots of this rank. A transport on GPUs waits
  // for several slots with one kernel.
  virtual void WaitAll(std::span<const PeerSlot> slots, const WaitReason& reason) {
    for (const auto& [peer, slot, chunk] : slots) {
      Wait(peer, slot, {reason.label, chunk, reason.timeout_s, reason.setting});
    }
  }
  // Allows the sender to overwrite this rank's slot. Called after this rank has read
  // it.
  virtual void Release(int slot) = 0;
  // Waits until the peer has released its slot, so that this rank may overwrite it.
  virtual void WaitFree(int peer, int slot, const WaitReason& reason) = 0;
  // Waits until peers have released several slots. A transport on GPUs waits for
  // several slots with one kernel.
  virtual void WaitAllFree(std::span<const PeerSlot> slots, const WaitReason& reason) {
    for (const auto& [peer, slot, chunk] : slots) {
      WaitFree(peer, slot, {reason.label, chunk, reason.timeout_s, reason.setting});
    }
  }

  // Ends the call, and advances the epochs (use counts) of its slots. Must be called
  // after the last step of each call.
  virtual void EndCall() = 0;
};

}  // namespace jax_ub
