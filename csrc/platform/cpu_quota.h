// How much processor time there is.
#pragma once

#include <optional>
#include <string>

namespace jax_ub {

// CoreAffinity that the control groups of this process allow it at a time, from cpu.max (version
// 2) or cpu.cfs_quota_us and cpu.cfs_period_us (version 1): the least along the path from
// its group to the root. nullopt: they do not limit it. The groups are mounted at `mount`,
// and `membership` says which ones are those of the process; within a container the mount
// begins at its own group.
std::optional<double> CpuQuota(const std::string& mount = "/sys/fs/cgroup",
                               const std::string& membership = "/proc/self/cgroup");

}  // namespace jax_ub
