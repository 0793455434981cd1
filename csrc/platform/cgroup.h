// Queries the limits that cgroups set, such as the limits of a container or a Slurm
// job.
//
// The limit of a process is the minimum of the limits of its group and of all ancestors
// of this group. `mount` is the directory where cgroups are mounted. In a container,
// this directory is the container's group. The file `membership` lists the groups of
// the process.
#pragma once

#include <cstdint>
#include <optional>
#include <string>

namespace jax_ub {

// Returns how many bytes this process can still allocate: the available memory of the
// machine or, if smaller, the memory that the limit of a cgroup leaves.
int64_t AvailableBytes(const std::string& mount = "/sys/fs/cgroup",
                       const std::string& membership = "/proc/self/cgroup");

// Returns how many cores (possibly a fraction) this process may use at a time, or
// nullopt if there is no limit.
std::optional<double> CpuQuota(const std::string& mount = "/sys/fs/cgroup",
                               const std::string& membership = "/proc/self/cgroup");

}  // namespace jax_ub
