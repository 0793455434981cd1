// Queries how much memory this process can still allocate.
#pragma once

#include <cstdint>
#include <string>

namespace jax_ub {

// Returns the number of bytes that this process can still allocate: the smaller of the
// machine's available memory and what remains of the container's limit. `cgroup` is the
// directory where control groups are mounted.
int64_t AvailableBytes(const std::string& cgroup = "/sys/fs/cgroup");

}  // namespace jax_ub
