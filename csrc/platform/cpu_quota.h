// Queries the CPU time limit of the container.
#pragma once

#include <optional>
#include <string>

namespace jax_ub {

// Returns the number of cores (possibly fractional) that the control groups of this
// process allow it to use at a time, or nullopt if they set no limit. Reads cpu.max
// (version 2) or cpu.cfs_quota_us and cpu.cfs_period_us (version 1) and takes the
// minimum along the path from the process's group to the root. Control groups are
// mounted at `mount`; the file `membership` lists the groups of the process. In a
// container, the mount starts at the container's group.
std::optional<double> CpuQuota(const std::string& mount = "/sys/fs/cgroup",
                               const std::string& membership = "/proc/self/cgroup");

}  // namespace jax_ub
