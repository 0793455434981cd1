// Lets test processes with ranks on GPUs exchange their addresses, and connects them.
#pragma once

#include <sys/mman.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstring>
#include <map>
#include <memory>
#include <sstream>
#include <string>
#include <thread>
#include <vector>

#include "check.h"
#include "cuda/emulated_driver.h"
#include "cuda/exchange.h"
#include "processes.h"
#include "transport/cuda/communicator.h"

namespace jax_ub {

// The capabilities that the processes publish, in shared memory.
class CapabilitiesBoard {
 public:
  CapabilitiesBoard()
      : entries_(new (mmap(nullptr,
                           sizeof(Entry) * Bulletin::kMaxProcesses,
                           PROT_READ | PROT_WRITE,
                           MAP_SHARED | MAP_ANONYMOUS,
                           -1,
                           0)) Entry[Bulletin::kMaxProcesses]) {}
  ~CapabilitiesBoard() { munmap(entries_, sizeof(Entry) * Bulletin::kMaxProcesses); }
  CapabilitiesBoard(const CapabilitiesBoard&) = delete;

  void Publish(int process, const Capabilities& capabilities) {
    std::string text;
    for (const auto& [key, value] : capabilities) {
      text.append(key).append("=").append(value).append("\n");
    }
    std::strcpy(entries_[process].text, text.c_str());
    ++entries_[process].num_published;
  }
  std::map<int, Capabilities> Read(int num_processes, int round) {
    std::map<int, Capabilities> capabilities_of;
    for (int p = 0; p < num_processes; ++p) {
      while (entries_[p].num_published < round) SleepBriefly();
      std::istringstream text(entries_[p].text);
      for (std::string line; std::getline(text, line);) {
        const size_t end = line.find('=');
        capabilities_of[p][line.substr(0, end)] = line.substr(end + 1);
      }
    }
    return capabilities_of;
  }

 private:
  struct Entry {
    char text[8192];
    std::atomic<int> num_published{0};
  };
  Entry* const entries_;
};

struct AddressExchange {
  Bulletin bulletin;
  CapabilitiesBoard capabilities_of;
};

// The options with which a test process connects.
struct Side {
  std::vector<int> process_of_rank;
  std::string host = "here";
  int64_t slots_bytes = RankOnGpu::kSlotsBytes;
  double timeout_s = 20;
  int round = 1;
  const Driver* driver = nullptr;  // the emulated one
  bool nvls = false;
  std::string fabric = {};  // what it offers in place of its handles
};

// Connects `process` to the group. Its n-th local rank is on device n.
inline std::shared_ptr<CudaCommunicator> ConnectOn(int process,
                                                   AddressExchange& addresses,
                                                   Side side) {
  const std::vector<int>& of_rank = side.process_of_rank;
  const int num_processes = *std::max_element(of_rank.begin(), of_rank.end()) + 1;
  std::vector<int> ordinals(std::count(of_rank.begin(), of_rank.end(), process));
  for (size_t n = 0; n < ordinals.size(); ++n) ordinals[n] = static_cast<int>(n);
  auto endpoint =
      std::make_unique<CudaEndpoint>(side.driver ? *side.driver : EmulatedDriver(),
                                     ordinals, side.slots_bytes, side.host, side.nvls);
  Capabilities capabilities = endpoint->capabilities();
  if (!side.fabric.empty()) capabilities["fabric"] = side.fabric;
  addresses.capabilities_of.Publish(process, capabilities);
  addresses.bulletin.Publish(process, endpoint->address());
  const auto capabilities_of =
      addresses.capabilities_of.Read(num_processes, side.round);
  auto peers = addresses.bulletin.Read(num_processes, side.round);
  std::erase_if(peers, [&](const auto& peer) {
    return capabilities_of.at(peer.first).at("host") != side.host;
  });
  CHECK_EQ(WhyNotConnected(of_rank, capabilities_of), "");
  return CudaCommunicator::Connect(std::move(endpoint), {of_rank, process, "tp"}, peers,
                                   capabilities_of, side.timeout_s);
}

// Returns whether a failure has a reason, not only the notification by a peer's device,
// which a device may receive before its host receives the reason.
inline bool SaysWhy(const std::string& text) {
  return !text.empty() && !Contains(text, " failed and notified ");
}

// Returns the reason for which the communicator failed, and waits up to 10 s for it.
inline std::string WithLabel(CudaCommunicator& communicator) {
  const auto begin = std::chrono::steady_clock::now();
  std::string text;
  do {
    text = check::TextOf(communicator.failure());
    if (SaysWhy(text)) break;
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  } while (SecondsSince(begin) < 10);
  return text;
}

inline std::string Describe(const std::vector<SharingFallback>& steps) {
  std::string text;
  for (const SharingFallback& step : steps) {
    text.append(step.mode).append(": ").append(step.reason).append("\n");
  }
  return text;
}

inline void CheckAllWell(Processes& processes) {
  for (const std::string& text : processes.Join()) CHECK_EQ(text, "");
}

// A mode of sharing memory, and machine options with which only that mode works.
struct WayCase {
  std::string mode;
  EmulatedOptions options;
};

inline std::vector<WayCase> Ways() {
  EmulatedOptions fabric;
  fabric.has_fd = false;
  fabric.has_fabric = true;
  EmulatedOptions ipc;
  ipc.has_vmm = false;
  return {{"vmm", {}}, {"fabric", fabric}, {"ipc", ipc}};
}

}  // namespace jax_ub
