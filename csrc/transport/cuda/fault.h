// Reads error records and converts them to exceptions.
#pragma once

#include <cstdint>
#include <exception>
#include <functional>
#include <string>
#include <vector>

#include "transport/cuda/flag_params.h"

namespace jax_ub {

// Returns the code of a record that a device may be writing. Unless it is
// ErrorRecord::kNone, the other members of the record are complete.
uint32_t CodeOf(const ErrorRecord& record);

// Sets `poisoned` in a rank's error record, which tells its device that all waits of
// the rank must fail.
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

// Converts an error record to a DeadlineError or a CommunicatorError. Its code must not
// be kNone. `site` is the call site in the record. `name_of` returns a text such as
// "rank 2 (process 1, pid 123)" for a rank; `call_of` returns one such as "matmul:
// matmul by ... (call site jit_f/0)" for a tag.
std::exception_ptr DescribeFault(const ErrorRecord& record,
                                 const CallSiteName& site,
                                 const std::function<std::string(int)>& name_of,
                                 const std::function<std::string(uint32_t)>& call_of);

}  // namespace jax_ub
