// What a device's error record says, in words.
#pragma once

#include <cstdint>
#include <exception>
#include <functional>
#include <string>
#include <vector>

#include "transport/cuda/flag_params.h"

namespace jax_ub {

// A record's code: a device may be writing it. What lies beside it is complete when it is
// not ErrorRecord::kNone.
uint32_t CodeOf(const ErrorRecord& record);

// Ends the waits of the record's rank.
void SetPoisoned(ErrorRecord& record);

// Whether the record has the reason, rather than only that somebody failed.
bool IsOwnFault(const ErrorRecord& record);

// What errors say of a call site.
struct CallSiteName {
  std::string label;
  std::vector<int64_t> devices;  // Attributes::devices

  bool operator==(const CallSiteName&) const = default;
};

// DeadlineError or CommunicatorError of a record whose code is not kNone. `site` is that
// of its call; `name_of` a rank: "rank 2 (process 1, pid 123)"; `call_of` the call site
// that has a tag: "matmul: matmul by ... (call site jit_f/0)".
std::exception_ptr DescribeFault(const ErrorRecord& record,
                                 const CallSiteName& site,
                                 const std::function<std::string(int)>& name_of,
                                 const std::function<std::string(uint32_t)>& call_of);

}  // namespace jax_ub
