#include "transport/cuda/fault.h"

#include <atomic>
#include <sstream>

#include "platform/error.h"

namespace jax_ub {

uint32_t CodeOf(const ErrorRecord& record) {
  return std::atomic_ref(const_cast<uint32_t&>(record.code))
      .load(std::memory_order_acquire);
}

void SetPoisoned(ErrorRecord& record) {
  std::atomic_ref(record.poisoned).store(1, std::memory_order_release);
}

std::exception_ptr DescribeFault(const ErrorRecord& record,
                                 const std::string& label,
                                 const std::function<std::string(int)>& name_of) {
  const uint32_t code = CodeOf(record);
  std::ostringstream text;
  text << "CommunicatorError: jax_ub." << label << ": ";
  const std::string own = name_of(static_cast<int>(record.rank));
  const std::string peer = name_of(static_cast<int>(record.peer));
  if (code == ErrorRecord::kPeerFailed) {
    text << peer << " failed, and told " << own;
    return std::make_exception_ptr(CommunicatorError(text.str()));
  }
  text << own << " waited " << static_cast<double>(record.waited_ns) * 1e-9
       << " s for ";
  if (record.slot == ErrorRecord::kNoSlot) {
    text << peer << " to end its previous call";
  } else {
    text << (record.chunk < 0 ? "all rows" : "chunk " + std::to_string(record.chunk))
         << " of " << peer << " in slot " << record.slot;
  }
  if (code != ErrorRecord::kDeadline) {
    text << " when the communicator failed";
    return std::make_exception_ptr(CommunicatorError(text.str()));
  }
  text << ". JAX_UB_TIMEOUT_S sets the seconds.";
  return std::make_exception_ptr(DeadlineError(text.str()));
}

}  // namespace jax_ub
