#include "platform/cpu_quota.h"

#include <algorithm>
#include <fstream>
#include <sstream>

namespace jax_ub {

namespace {

std::optional<double> Divide(std::istream&& quota, std::istream&& period) {
  double quota_us = 0;
  double period_us = 0;
  // There is no limit if the quota is "max" (version 2) or -1 (version 1), or has no
  // file.
  if (!(quota >> quota_us) || !(period >> period_us)) return std::nullopt;
  if (quota_us <= 0 || period_us <= 0) return std::nullopt;
  return quota_us / period_us;
}

std::optional<double> QuotaOf(const std::string& folder) {
  std::string quota, period;
  std::ifstream file(folder + "/cpu.max");
  if (file >> quota >> period) {
    return Divide(std::istringstream(quota), std::istringstream(period));
  }
  return Divide(std::ifstream(folder + "/cpu.cfs_quota_us"),
                std::ifstream(folder + "/cpu.cfs_period_us"));
}

// Parses a line "number:controllers:path" of /proc/self/cgroup. If it has the CPU
// controller, returns the path, and sets `hierarchy` to its directory below the mount
// point.
std::optional<std::string> PathOf(const std::string& line, std::string* hierarchy) {
  const size_t first = line.find(':');
  const size_t second = line.find(':', first + 1);
  if (first == std::string::npos || second == std::string::npos) return std::nullopt;
  const std::string controllers = line.substr(first + 1, second - first - 1);
  if (controllers.empty()) {
    *hierarchy = "";  // version 2 has a single hierarchy
  } else if (("," + controllers + ",").find(",cpu,") != std::string::npos) {
    // Controllers may share a mount, such as "cpu,cpuacct". /cpu is then a symbolic
    // link to it.
    *hierarchy = "/cpu";
  } else {
    return std::nullopt;
  }
  return line.substr(second + 1);
}

}  // namespace

std::optional<double> CpuQuota(const std::string& mount,
                               const std::string& membership) {
  std::optional<double> least;
  std::ifstream file(membership);
  for (std::string line, hierarchy; std::getline(file, line);) {
    std::optional<std::string> path = PathOf(line, &hierarchy);
    while (path) {
      if (*path == "/") path->clear();
      if (const auto quota = QuotaOf(mount + hierarchy + *path)) {
        least = std::min(least.value_or(*quota), *quota);
      }
      if (path->empty()) break;
      path->resize(path->rfind('/') == std::string::npos ? 0 : path->rfind('/'));
    }
  }
  return least;
}

}  // namespace jax_ub
