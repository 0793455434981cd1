#include "transport/cuda/capabilities.h"

#include <algorithm>
#include <charconv>
#include <cstdint>
#include <set>
#include <sstream>
#include <utility>

namespace jax_ub {

namespace {

std::string ValueOf(const Capabilities& capabilities, const std::string& key) {
  const auto found = capabilities.find(key);
  return found == capabilities.end() ? "" : found->second;
}

std::vector<std::string> Split(const std::string& text) {
  std::vector<std::string> parts;
  std::istringstream stream(text);
  for (std::string part; std::getline(stream, part, ',');) parts.push_back(part);
  return parts;
}

std::string NameOf(int rank, int process) {
  return "rank " + std::to_string(rank) + " (process " + std::to_string(process) + ")";
}

// Returns an error text that names the first two ranks whose GPUs cannot access each
// other, or "" if no such pair is known. A process that sees only its own GPUs does not
// know whether they can access other GPUs until it maps the memory.
std::string UnreachableReason(const std::vector<int>& processes,
                              const std::map<int, Capabilities>& capabilities_of) {
  std::vector<std::string> gpus;  // UUIDs, indexed by rank
  std::map<int, size_t> counts;
  for (const int process : processes) {
    const std::vector<std::string> own =
        Split(ValueOf(capabilities_of.at(process), kGpusKey));
    const size_t n = counts[process]++;
    gpus.push_back(n < own.size() ? own[n] : "");
  }
  for (size_t rank = 0; rank < processes.size(); ++rank) {
    const std::vector<std::string> unreachable =
        Split(ValueOf(capabilities_of.at(processes[rank]), kUnreachableKey));
    for (size_t peer = 0; peer < processes.size(); ++peer) {
      const std::string pair = gpus[rank] + ">" + gpus[peer];
      if (std::find(unreachable.begin(), unreachable.end(), pair) == unreachable.end())
        continue;
      return "the GPU of " + NameOf(static_cast<int>(rank), processes[rank]) +
             " cannot access that of " +
             NameOf(static_cast<int>(peer), processes[peer]) +
             " (cuDeviceCanAccessPeer): there is no NVLink or PCIe peer-to-peer "
             "between them";
    }
  }
  return "";
}

// Returns why some process in `members` does not support a feature, such as a sharing
// mode, or "" if all of them support it. The Capabilities of a process have the key
// `can_key` if it supports the feature. Otherwise they have the key `cannot_key`, with
// the reason as its value.
std::string WhyNot(const std::string& can_key,
                   const std::string& cannot_key,
                   const std::set<int>& members,
                   const std::map<int, Capabilities>& capabilities_of) {
  for (const int process : members) {
    const Capabilities& capabilities = capabilities_of.at(process);
    if (capabilities.count(can_key) != 0) continue;
    const std::string reason = ValueOf(capabilities, cannot_key);
    return "process " + std::to_string(process) + ": " +
           (reason.empty() ? "offers nothing" : reason);
  }
  return "";
}

}  // namespace

void AppendItem(std::string& list, const std::string& item) {
  if (!list.empty()) list.push_back(',');
  list.append(item);
}

std::string HexOf(const void* bytes, size_t size) {
  constexpr char kDigits[] = "0123456789abcdef";
  std::string text;
  for (size_t i = 0; i < size; ++i) {
    const auto byte = static_cast<const unsigned char*>(bytes)[i];
    text += {kDigits[byte >> 4], kDigits[byte & 15]};
  }
  return text;
}

bool ReadHex(const std::string& hex, void* bytes, size_t size) {
  if (hex.size() != 2 * size) return false;
  for (size_t i = 0; i < size; ++i) {
    const char* const end = hex.data() + 2 * (i + 1);
    if (std::from_chars(end - 2, end, static_cast<uint8_t*>(bytes)[i], 16).ptr != end) {
      return false;
    }
  }
  return true;
}

const char* SharingModeName(SharingMode mode) {
  switch (mode) {
    case SharingMode::kVmm:
      return "vmm";
    case SharingMode::kFabric:
      return "fabric";
    case SharingMode::kIpc:
      return "ipc";
  }
  return "";
}

std::string CannotKey(SharingMode mode) {
  return std::string("no ") + SharingModeName(mode);
}

std::vector<SharingFallback> FallbacksTo(SharingMode mode,
                                         const SharingDecision& decision,
                                         const std::vector<SharingFallback>& failed) {
  std::vector<SharingFallback> steps;
  for (const SharingMode before : kSharingModes) {
    if (before == mode) break;
    for (const auto* list : {&decision.fallbacks, &failed}) {
      for (const SharingFallback& step : *list) {
        if (step.mode == SharingModeName(before)) steps.push_back(step);
      }
    }
  }
  return steps;
}

std::string RejectionOf(const SharingDecision& decision,
                        const std::vector<SharingFallback>& failed) {
  std::string modes;
  for (const auto* list : {&decision.fallbacks, &failed}) {
    for (const SharingFallback& step : *list) {
      modes += (modes.empty() ? "" : "; ") + step.mode + ": " + step.reason;
    }
  }
  return "its processes have no way to share device memory: " + modes;
}

SharingDecision Agree(const std::vector<int>& processes,
                      const std::map<int, Capabilities>& capabilities_of) {
  SharingDecision decision;
  const std::set<int> members(processes.begin(), processes.end());
  std::set<std::string> hosts;
  for (const int process : members) {
    if (capabilities_of.count(process) == 0) {
      decision.rejection = "process " + std::to_string(process) + " offers nothing";
      return decision;
    }
    hosts.insert(ValueOf(capabilities_of.at(process), kHostKey));
  }
  decision.spans_hosts = hosts.size() > 1;
  decision.rejection = UnreachableReason(processes, capabilities_of);
  if (!decision.rejection.empty()) return decision;
  for (const SharingMode mode : kSharingModes) {
    const bool is_unreachable = decision.spans_hosts && mode != SharingMode::kFabric;
    const std::string reason =
        is_unreachable
            ? "its ranks span " + std::to_string(hosts.size()) + " hosts"
            : WhyNot(SharingModeName(mode), CannotKey(mode), members, capabilities_of);
    if (reason.empty()) {
      decision.modes.push_back(mode);
    } else {
      decision.fallbacks.push_back({SharingModeName(mode), reason});
    }
  }
  if (decision.modes.empty()) {
    decision.rejection = RejectionOf(decision, {});
  }
  return decision;
}

// A group that spans hosts cannot use multicast. During its setup, processes wait for
// each other, and if it fails in one process, a message must end the waits of the
// others. Processes of different hosts have no connection for such a message.
std::string WhyNoMulticast(SharingMode mode,
                           const std::vector<int>& processes,
                           const std::map<int, Capabilities>& capabilities_of) {
  if (mode == SharingMode::kIpc) return "the heaps are shared by ipc";
  const std::set<int> members(processes.begin(), processes.end());
  std::set<std::string> hosts;
  std::set<std::string> gpus;
  size_t num_ranks = 0;
  for (const int process : members) {
    hosts.insert(ValueOf(capabilities_of.at(process), kHostKey));
    for (const std::string& gpu :
         Split(ValueOf(capabilities_of.at(process), kGpusKey))) {
      gpus.insert(gpu);
      ++num_ranks;
    }
  }
  if (hosts.size() > 1) {
    return "its ranks span " + std::to_string(hosts.size()) + " hosts";
  }
  if (gpus.size() < num_ranks) return "several of its ranks have one GPU";
  return WhyNot(kNvls, kCannotNvlsKey, members, capabilities_of);
}

std::string WhyNotConnected(const std::vector<int>& processes,
                            const std::map<int, Capabilities>& capabilities_of) {
  return Agree(processes, capabilities_of).rejection;
}

}  // namespace jax_ub
