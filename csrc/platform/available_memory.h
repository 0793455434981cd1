// How much memory there is.
#pragma once

#include <cstdint>
#include <string>

namespace jax_ub {

// Bytes that this process may still take: of the machine, and of its container, whose
// control groups are mounted at `cgroup`.
int64_t AvailableBytes(const std::string& cgroup = "/sys/fs/cgroup");

}  // namespace jax_ub
