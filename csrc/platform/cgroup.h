// Queries the limits that cgroups set, such as those of a container or a Slurm job.
//
// A limit is the minimum from the process's group up to the root. `mount` is the
// directory where cgroups are mounted; in a container, it is the container's group. The
// file `membership` lists the groups of the process.
#pragma once

#include <cstdint>
#include <optional>
#include <string>

namespace jax_ub {

// Returns how many bytes this process can still allocate: the available memory of the
// machine or, if smaller, the rest of the limit of a group.
int64_t AvailableBytes(const std::string& mount = "/sys/fs/cgroup",
                       const std::string& membership = "/proc/self/cgroup");

// Returns how many cores (possibly a fraction) this process may use at a time, or
// nullopt if there is no limit.
std::optional<double> CpuQuota(const std::string& mount = "/sys/fs/cgroup",
                               const std::string& membership = "/proc/self/cgroup");

}  // namespace jax_ub
