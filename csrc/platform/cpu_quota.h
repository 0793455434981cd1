// Queries the CPU time limit of the container.
#pragma once

#include <optional>
#include <string>

namespace jax_ub {

// Returns how many cores (possibly a fraction) the cgroups of this process allow it to
// use at a time, or nullopt if there is no limit. Reads cpu.max (version 2) or
// cpu.cfs_quota_us and cpu.cfs_period_us (version 1), and takes the minimum from the
// process's group up to the root. `mount` is the directory where cgroups are mounted;
// in a container, it is the container's group. The file `membership` lists the groups
// of the process.
std::optional<double> CpuQuota(const std::string& mount = "/sys/fs/cgroup",
                               const std::string& membership = "/proc/self/cgroup");

}  // namespace jax_ub
