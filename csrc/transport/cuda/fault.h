// Reads error records and converts them to exceptions.
#pragma once

#include <cstdint>
#include <exception>
#include <functional>
#include <string>
#include <vector>

#include "transport/cuda/flag_params.h"

namespace jax_ub {

// Loads a record's code with acquire, since a device may be writing it. If the result
// is not ErrorRecord::kNone, the other members are complete.
uint32_t CodeOf(const ErrorRecord& record);

// Marks the record as poisoned, so that every wait of its rank ends with an error.
void SetPoisoned(ErrorRecord& record);

// Returns whether the record has the cause of a failure. Returns false if it only says
// that a peer or the host reported one.
bool IsOwnFault(const ErrorRecord& record);

// The names by which error messages refer to a call site.
struct CallSiteName {
  std::string label;             // "all_gather_matmul (ub_name 'qkv_fprop')"
  std::vector<int64_t> devices;  // CallAttributes::devices

  bool operator==(const CallSiteName&) const = default;
};

// Converts a record whose code is not kNone to a DeadlineError or a CommunicatorError.
// `site` is the call site of the record. `name_of` describes a rank, for example "rank
// 2 (process 1, pid 123)". `call_of` describes the call with a tag, for example
// "matmul: matmul by ... (call site jit_f/0)".
std::exception_ptr DescribeFault(const ErrorRecord& record,
                                 const CallSiteName& site,
                                 const std::function<std::string(int)>& name_of,
                                 const std::function<std::string(uint32_t)>& call_of);

}  // namespace jax_ub
