#include "transport/cuda/fault.h"

#include <atomic>
#include <sstream>

#include "platform/error.h"

namespace jax_ub {

namespace {

// Returns the end of the error text about a rank that runs a program on the wrong
// device, such as " runs partition 1, which is that of device 6: ...". The name of the
// rank precedes it.
std::string DescribeMisplaced(uint32_t partition, const std::vector<int64_t>& devices) {
  std::ostringstream text;
  text << " runs partition " << partition;
  if (partition < devices.size()) {
    text << ", which is that of device " << devices[partition];
  }
  text << ": the program was lowered for export for the devices [";
  for (size_t i = 0; i < devices.size(); ++i) {
    text << (i == 0 ? "" : ", ") << devices[i];
  }
  text
      << "] in that order, and is called on them in another. On GPUs call it on a mesh "
         "of these devices in that order, or export it for the mesh that it is called "
         "on";
  return text.str();
}

}  // namespace

uint32_t CodeOf(const ErrorRecord& record) {
  return std::atomic_ref(const_cast<uint32_t&>(record.code))
      .load(std::memory_order_acquire);
}

void SetPoisoned(ErrorRecord& record) {
  std::atomic_ref(record.poisoned).store(1, std::memory_order_release);
}

bool IsOwnFault(const ErrorRecord& record) {
  const uint32_t code = CodeOf(record);
  return code == ErrorRecord::kDeadline || code == ErrorRecord::kMisplaced ||
         record.tag != 0;
}

std::exception_ptr DescribeFault(const ErrorRecord& record,
                                 const CallSiteName& site,
                                 const std::function<std::string(int)>& name_of,
                                 const std::function<std::string(uint32_t)>& call_of) {
  const uint32_t code = CodeOf(record);
  std::ostringstream text;
  text << "CommunicatorError: jax_ub." << site.label << ": ";
  const std::string own = name_of(static_cast<int>(record.rank));
  const std::string peer = name_of(static_cast<int>(record.peer));
  if (record.tag != 0) {
    if (code == ErrorRecord::kOtherCall) {
      text << own << " and " << peer << " make different calls: ";
    } else {
      text << peer << " notified " << own << " that ranks make different calls: ";
    }
    text
        << call_of(record.tag) << "; and " << call_of(record.other_tag)
        << ", respectively. All ranks must make the same calls in the same order: "
           "dispatch the programs that communicate from one thread of each process, in "
           "the same order in all of them";
    return std::make_exception_ptr(CommunicatorError(text.str()));
  }
  if (code == ErrorRecord::kPeerFailed) {
    text << peer << " failed and notified " << own;
    return std::make_exception_ptr(CommunicatorError(text.str()));
  }
  if (code == ErrorRecord::kMisplaced) {
    text << own << DescribeMisplaced(record.partition, site.devices);
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
