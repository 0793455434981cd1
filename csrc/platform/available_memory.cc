#include "platform/available_memory.h"

#include <algorithm>
#include <fstream>
#include <limits>
#include <optional>

namespace jax_ub {

namespace {

// File names of the memory controller in cgroups of version 2 and of version 1.
struct Controller {
  const char* folder;
  const char* limit;  // contains a number of bytes, or "max"
  const char* usage;
  const char* stat_prefix;  // prefix of the keys that include the child groups
};
constexpr Controller kControllers[] = {
    {"/", "memory.max", "memory.current", ""},
    {"/memory/", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_"},
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

}  // namespace

int64_t AvailableBytes(const std::string& cgroup) {
  int64_t available_bytes = std::numeric_limits<int64_t>::max();
  if (const auto kilobytes = NumberOf("/proc/meminfo", "MemAvailable:")) {
    available_bytes = *kilobytes * 1024;
  }
  for (const Controller& controller : kControllers) {
    const std::string folder = cgroup + controller.folder;
    const auto limit = NumberIn(folder + controller.limit);
    const auto usage = NumberIn(folder + controller.usage);
    if (!limit || !usage) continue;
    // Page cache counts as available memory, as in MemAvailable, because the kernel
    // reclaims it on demand.
    int64_t taken_bytes = *usage;
    for (const char* cache : {"active_file", "inactive_file"}) {
      const std::string key = std::string(controller.stat_prefix) + cache;
      taken_bytes -= NumberOf(folder + "memory.stat", key).value_or(0);
    }
    const int64_t left_bytes = *limit - std::max<int64_t>(taken_bytes, 0);
    available_bytes = std::clamp<int64_t>(left_bytes, 0, available_bytes);
  }
  return available_bytes;
}

}  // namespace jax_ub
