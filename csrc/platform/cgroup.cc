#include "platform/cgroup.h"

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <limits>
#include <sstream>

namespace jax_ub {

namespace {

// Calls visit(directory) for each cgroup of this process in the hierarchy of the
// controller, such as "memory". Visits the process's group first and the root last.
template <typename Visit>
void ForEachGroup(const std::string& mount,
                  const std::string& membership,
                  const std::string& controller,
                  const Visit& visit) {
  std::ifstream file(membership);
  std::string number, controllers, path;
  while (std::getline(file, number, ':') && std::getline(file, controllers, ':') &&
         std::getline(file, path)) {
    std::string hierarchy = mount;  // version 2 has a single hierarchy
    if (!controllers.empty()) {
      if (("," + controllers + ",").find("," + controller + ",") == std::string::npos) {
        continue;
      }
      // Several controllers may share a mount, such as "cpu,cpuacct". /cpu is then a
      // symbolic link to this mount.
      hierarchy += "/" + controller;
    }
    for (std::filesystem::path group = path;; group = group.parent_path()) {
      visit(hierarchy + group.string());
      if (group == group.parent_path()) break;
    }
  }
}

// File names of the memory controller in cgroups of version 2 and of version 1.
struct MemoryFiles {
  const char* limit;  // contains a number of bytes, or "max"
  const char* usage;
  const char* stat_prefix;  // prefix of the keys that include the child groups
};
constexpr MemoryFiles kMemoryFiles[] = {
    {"/memory.max", "/memory.current", ""},
    {"/memory.limit_in_bytes", "/memory.usage_in_bytes", "total_"},
};

std::optional<int64_t> NumberIn(const std::string& path) {
  std::ifstream file(path);
  int64_t number = 0;
  if (file >> number) return number;
  return std::nullopt;
}

// Returns the number that follows `key` in a file of lines "key number".
std::optional<int64_t> NumberOf(const std::string& path, const std::string& key) {
  std::ifstream file(path);
  for (std::string found, rest; file >> found && std::getline(file, rest);) {
    if (found == key) return std::stoll(rest);
  }
  return std::nullopt;
}

// Returns how many bytes a cgroup may still allocate under its memory limit, or nullopt
// if it has no limit.
std::optional<int64_t> MemoryLeftIn(const std::string& group) {
  for (const MemoryFiles& files : kMemoryFiles) {
    const auto limit = NumberIn(group + files.limit);
    const auto usage = NumberIn(group + files.usage);
    if (!limit || !usage) continue;
    // Page cache counts as available memory, as in MemAvailable, because the kernel
    // reclaims it on demand.
    int64_t taken_bytes = *usage;
    for (const char* cache : {"active_file", "inactive_file"}) {
      const std::string key = std::string(files.stat_prefix) + cache;
      taken_bytes -= NumberOf(group + "/memory.stat", key).value_or(0);
    }
    return *limit - std::max<int64_t>(taken_bytes, 0);
  }
  return std::nullopt;
}

std::optional<double> Divide(std::istream&& quota, std::istream&& period) {
  double quota_us = 0;
  double period_us = 0;
  // There is no limit if the quota is "max" (version 2) or -1 (version 1), or if its
  // file does not exist.
  if (!(quota >> quota_us) || !(period >> period_us)) return std::nullopt;
  if (quota_us <= 0 || period_us <= 0) return std::nullopt;
  return quota_us / period_us;
}

std::optional<double> QuotaOf(const std::string& group) {
  std::string quota, period;
  std::ifstream file(group + "/cpu.max");
  if (file >> quota >> period) {
    return Divide(std::istringstream(quota), std::istringstream(period));
  }
  return Divide(std::ifstream(group + "/cpu.cfs_quota_us"),
                std::ifstream(group + "/cpu.cfs_period_us"));
}

}  // namespace

int64_t AvailableBytes(const std::string& mount, const std::string& membership) {
  int64_t available_bytes = std::numeric_limits<int64_t>::max();
  if (const auto kilobytes = NumberOf("/proc/meminfo", "MemAvailable:")) {
    available_bytes = *kilobytes * 1024;
  }
  ForEachGroup(mount, membership, "memory", [&](const std::string& group) {
    if (const auto left_bytes = MemoryLeftIn(group)) {
      available_bytes = std::clamp<int64_t>(*left_bytes, 0, available_bytes);
    }
  });
  return available_bytes;
}

std::optional<double> CpuQuota(const std::string& mount,
                               const std::string& membership) {
  std::optional<double> least;
  ForEachGroup(mount, membership, "cpu", [&](const std::string& group) {
    if (const auto quota = QuotaOf(group)) {
      least = std::min(least.value_or(*quota), *quota);
    }
  });
  return least;
}

}  // namespace jax_ub
