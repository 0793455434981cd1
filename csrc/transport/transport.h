// How pieces get from one rank to another: one end of a communicator, which belongs to
// one rank and is used by one thread at a time.
//
// Every rank has the same slots. A slot is filled by one put and emptied by one release
// per call, or not used by it, on all ranks alike; so both sides know its epoch, the
// number of calls that used it. The epochs live with the buffers and only grow; they
// are compared by signed difference and may wrap around.
//
// Memory order: what a rank wrote before Signal is visible to the peer after its Wait,
// and what the peer read before Release happens before WaitFree returns. Every wait ends:
// with its condition, with CommunicatorError when some rank failed (at once, with that
// rank's reason), or with DeadlineError.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>

namespace jax_ub {

// Rows of contiguous bytes, which arrive packed.
struct Rows {
  const std::byte* data = nullptr;
  int64_t num_rows = 0;
  int64_t row_bytes = 0;
  int64_t stride_bytes = 0;
};

// What a wait says when it fails.
struct WaitReason {
  const std::string& label;  // "all_gather_matmul (ub_name 'qkv_fprop')"
  int chunk = 0;
  double timeout_s = 0;
  std::string_view setting = "JAX_UB_TIMEOUT_S";  // of the timeout
};

class Transport {
 public:
  virtual ~Transport() = default;

  virtual int rank() const = 0;
  virtual int num_ranks() const = 0;

  // The own slot's memory: to be read between Wait and Release.
  virtual const std::byte* slot(int index) const = 0;

  // Only after WaitFree. `rows` lie one behind the other in the peer's slot.
  virtual void Write(int peer, int slot, const Rows& rows) = 0;
  // Tells the peer that its slot is filled.
  virtual void Signal(int peer, int slot) = 0;

  virtual void Wait(int peer, int slot, const WaitReason& reason) = 0;
  virtual void Release(int slot) = 0;
  virtual void WaitFree(int peer, int slot, const WaitReason& reason) = 0;

  // Behind the last step of a call.
  virtual void EndCall() = 0;
};

}  // namespace jax_ub
