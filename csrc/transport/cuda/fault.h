// What a device's error record says, in words.
#pragma once

#include <exception>
#include <functional>
#include <string>

#include "transport/cuda/flag_params.h"

namespace jax_ub {

// A record's code: a device may be writing it. What lies beside it is complete when it is
// not ErrorRecord::kNone.
uint32_t CodeOf(const ErrorRecord& record);

// Ends the waits of the record's rank.
void SetPoisoned(ErrorRecord& record);

// DeadlineError or CommunicatorError of a record whose code is not kNone. `label` is that
// of its call site; `name_of` a rank: "rank 2 (process 1, pid 123)".
std::exception_ptr DescribeFault(const ErrorRecord& record,
                                 const std::string& label,
                                 const std::function<std::string(int)>& name_of);

}  // namespace jax_ub
