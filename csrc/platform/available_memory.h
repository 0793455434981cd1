// Queries how much memory this process can still allocate.
#pragma once

#include <cstdint>
#include <string>

namespace jax_ub {

// Returns how many bytes this process can still allocate: the available memory of the
// machine or, if smaller, the rest of the container's limit. `cgroup` is the directory
// where cgroups are mounted.
int64_t AvailableBytes(const std::string& cgroup = "/sys/fs/cgroup");

}  // namespace jax_ub
