#include "transport/cuda/offer.h"

#include <algorithm>
#include <charconv>
#include <cstdint>
#include <set>
#include <sstream>
#include <utility>

namespace jax_ub {

namespace {

std::string ValueOf(const Offer& offer, const std::string& key) {
  const auto found = offer.find(key);
  return found == offer.end() ? "" : found->second;
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

// The first pair of ranks whose devices are known not to reach each other. A process may
// see its own devices only: then nothing is known before its memory is mapped.
std::string WhyApart(const std::vector<int>& processes,
                     const std::map<int, Offer>& offers) {
  std::vector<std::string> gpus;  // [rank]
  std::map<int, size_t> counts;
  for (const int process : processes) {
    const std::vector<std::string> own = Split(ValueOf(offers.at(process), kGpusKey));
    const size_t n = counts[process]++;
    gpus.push_back(n < own.size() ? own[n] : "");
  }
  for (size_t rank = 0; rank < processes.size(); ++rank) {
    const std::vector<std::string> apart =
        Split(ValueOf(offers.at(processes[rank]), kApartKey));
    for (size_t peer = 0; peer < processes.size(); ++peer) {
      const std::string pair = gpus[rank] + ">" + gpus[peer];
      if (std::find(apart.begin(), apart.end(), pair) == apart.end()) continue;
      return "the GPU of " + NameOf(static_cast<int>(rank), processes[rank]) +
             " cannot access that of " +
             NameOf(static_cast<int>(peer), processes[peer]) +
             " (cuDeviceCanAccessPeer): there is no NVLink or PCIe peer-to-peer "
             "between them";
    }
  }
  return "";
}

// Which process cannot, and why; or "".
std::string WhyNot(const std::string& can_key,
                   const std::string& cannot_key,
                   const std::set<int>& members,
                   const std::map<int, Offer>& offers) {
  for (const int process : members) {
    const Offer& offer = offers.at(process);
    if (offer.count(can_key) != 0) continue;
    const std::string reason = ValueOf(offer, cannot_key);
    return "process " + std::to_string(process) + ": " +
           (reason.empty() ? "offers nothing" : reason);
  }
  return "";
}

}  // namespace

void AppendPart(std::string& list, const std::string& part) {
  if (!list.empty()) list.push_back(',');
  list.append(part);
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

const char* WayName(Way way) {
  switch (way) {
    case Way::kVmm:
      return "vmm";
    case Way::kFabric:
      return "fabric";
    case Way::kIpc:
      return "ipc";
  }
  return "";
}

std::string CannotKey(Way way) { return std::string("no ") + WayName(way); }

std::vector<StepDown> StepDownsTo(Way way,
                                  const Agreement& agreement,
                                  const std::vector<StepDown>& failed) {
  std::vector<StepDown> steps;
  for (const Way before : kWays) {
    if (before == way) break;
    for (const auto* list : {&agreement.step_downs, &failed}) {
      for (const StepDown& step : *list) {
        if (step.way == WayName(before)) steps.push_back(step);
      }
    }
  }
  return steps;
}

std::string RefusalOf(const Agreement& agreement, const std::vector<StepDown>& failed) {
  std::string ways;
  for (const auto* list : {&agreement.step_downs, &failed}) {
    for (const StepDown& step : *list) {
      ways += (ways.empty() ? "" : "; ") + step.way + ": " + step.reason;
    }
  }
  return "its processes have no way to share device memory: " + ways;
}

Agreement Agree(const std::vector<int>& processes, const std::map<int, Offer>& offers) {
  Agreement agreement;
  const std::set<int> members(processes.begin(), processes.end());
  std::set<std::string> hosts;
  for (const int process : members) {
    if (offers.count(process) == 0) {
      agreement.refusal = "process " + std::to_string(process) + " offers nothing";
      return agreement;
    }
    hosts.insert(ValueOf(offers.at(process), kHostKey));
  }
  agreement.spans_hosts = hosts.size() > 1;
  agreement.refusal = WhyApart(processes, offers);
  if (!agreement.refusal.empty()) return agreement;
  for (const Way way : kWays) {
    const bool is_apart = agreement.spans_hosts && way != Way::kFabric;
    const std::string reason =
        is_apart ? "its ranks span " + std::to_string(hosts.size()) + " hosts"
                 : WhyNot(WayName(way), CannotKey(way), members, offers);
    if (reason.empty()) {
      agreement.ways.push_back(way);
    } else {
      agreement.step_downs.push_back({WayName(way), reason});
    }
  }
  if (agreement.ways.empty()) {
    agreement.refusal = RefusalOf(agreement, {});
  }
  return agreement;
}

// Between hosts nobody could say that he failed while others wait for him.
std::string WhyNoMulticast(Way way,
                           const std::vector<int>& processes,
                           const std::map<int, Offer>& offers) {
  if (way == Way::kIpc) return "the heaps are shared by ipc";
  const std::set<int> members(processes.begin(), processes.end());
  std::set<std::string> hosts;
  std::set<std::string> gpus;
  size_t num_ranks = 0;
  for (const int process : members) {
    hosts.insert(ValueOf(offers.at(process), kHostKey));
    for (const std::string& gpu : Split(ValueOf(offers.at(process), kGpusKey))) {
      gpus.insert(gpu);
      ++num_ranks;
    }
  }
  if (hosts.size() > 1) {
    return "its ranks span " + std::to_string(hosts.size()) + " hosts";
  }
  if (gpus.size() < num_ranks) return "several of its ranks have one GPU";
  return WhyNot(kNvls, kCannotNvlsKey, members, offers);
}

std::string WhyNotConnected(const std::vector<int>& processes,
                            const std::map<int, Offer>& offers) {
  return Agree(processes, offers).refusal;
}

}  // namespace jax_ub
