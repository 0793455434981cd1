// Reads error records and converts them to exceptions.
#pragma once

#include <cstdint>
#include <exception>
#include <functional>
#include <string>
#include <vector>

#include "transport/cuda/flag_params.h"

namespace jax_ub {

// Returns the code of a record, while a device may be filling the record. If the code
// is not ErrorRecord::kNone, the other members of the record are complete.
uint32_t CodeOf(const ErrorRecord& record);

// Sets `poisoned` in the error record of a rank. The rank's device reads it and makes
// all waits of the rank fail.
void SetPoisoned(ErrorRecord& record);

// Returns whether the record states the cause of a failure. Returns false if it only
// states that a peer or the host reported a failure.
bool IsOwnFault(const ErrorRecord& record);

// A call site, as error messages describe it: its label, and the devices for which an
// exported program was lowered.
struct CallSiteName {
  std::string label;             // "all_gather_matmul (ub_name 'qkv_fprop')"
  std::vector<int64_t> devices;  // CallAttributes::devices

  bool operator==(const CallSiteName&) const = default;
};

// Converts an error record, whose code must not be kNone, to a DeadlineError or a
// CommunicatorError. `site` is the call site in the record. `name_of` returns the name
// of a rank, such as "rank 2 (process 1, pid 123)". `call_of` returns the description
// of the call with a tag, such as "matmul: matmul by ... (call site jit_f/0)".
std::exception_ptr DescribeFault(const ErrorRecord& record,
                                 const CallSiteName& site,
                                 const std::function<std::string(int)>& name_of,
                                 const std::function<std::string(uint32_t)>& call_of);

}  // namespace jax_ub
