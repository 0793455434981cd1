// The ways in which processes may share device memory, and which one a group takes.
#pragma once

#include <cstddef>
#include <map>
#include <string>
#include <vector>

namespace jax_ub {

// What a process says to the others: what it can do, and why not the rest. Texts, of a
// few kilobytes.
using Capabilities = std::map<std::string, std::string>;

// In order of preference. XLA's own communicator and its windows, which would come first,
// are not used: docs/gpu.md says why.
enum class SharingMode { kVmm, kFabric, kIpc };
inline constexpr SharingMode kWays[] = {SharingMode::kVmm, SharingMode::kFabric,
                                        SharingMode::kIpc};
const char* WayName(SharingMode mode);  // "vmm", "fabric", "ipc"

// A way that was not taken, though it is preferred to the one that was.
struct SharingFallback {
  std::string mode;    // "vmm"
  std::string reason;  // "process 1: cuMemCreate: CUDA_ERROR_NOT_PERMITTED: ..."
  bool operator==(const SharingFallback&) const = default;
};
// The keys of an offer. A way has its own name as its key if the process can share by it
// (the value is what to share, for fabric), and otherwise CannotKey, with the reason.
inline constexpr char kHostKey[] = "host";
inline constexpr char kGpusKey[] = "gpus";  // "uuid,uuid", of the own ranks
// "uuid>uuid,...": GPUs of this process that cannot access one that it sees.
inline constexpr char kApartKey[] = "apart";
std::string CannotKey(SharingMode mode);

// Multicast comes on top of a way, where it is asked for: the name of its step down, and
// the keys of what a process says of it.
inline constexpr char kNvls[] = "nvls";
inline constexpr char kCannotNvlsKey[] = "no nvls";

// Makes a list of parts with commas between them.
void AppendPart(std::string& list, const std::string& part);

// Bytes as text, and back: false where the text is not that of so many.
std::string HexOf(const void* bytes, size_t size);
bool ReadHex(const std::string& hex, void* bytes, size_t size);

struct SharingDecision {
  std::vector<SharingMode> modes;  // that all can share by, best first
  std::vector<SharingFallback> fallbacks;
  std::string refusal;  // why there is none; otherwise ""
  bool spans_hosts = false;
};

// `processes` [rank]; `offers` by process. A pure function: all processes come to the
// same answer.
SharingDecision Agree(const std::vector<int>& processes,
                      const std::map<int, Capabilities>& capabilities_of);

// All that come before `way`: what could not be agreed, and what then failed.
std::vector<SharingFallback> FallbacksTo(SharingMode mode,
                                         const SharingDecision& decision,
                                         const std::vector<SharingFallback>& failed);
// The reason when no way is left.
std::string RefusalOf(const SharingDecision& decision,
                      const std::vector<SharingFallback>& failed);

// Why heaps that are shared by `way` get no multicast, or "".
std::string WhyNoMulticast(SharingMode mode,
                           const std::vector<int>& processes,
                           const std::map<int, Capabilities>& capabilities_of);

// Why these processes' GPUs cannot share memory, or "".
std::string WhyNotConnected(const std::vector<int>& processes,
                            const std::map<int, Capabilities>& capabilities_of);

}  // namespace jax_ub
