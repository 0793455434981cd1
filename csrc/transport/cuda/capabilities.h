// The modes in which processes may share device memory, and the choice of one for a
// group.
#pragma once

#include <cstddef>
#include <map>
#include <string>
#include <vector>

namespace jax_ub {

// What a process sends to the other processes about itself: for each sharing mode,
// whether it supports the mode, or why it does not. A few kilobytes of text.
using Capabilities = std::map<std::string, std::string>;

// In order of preference: virtual memory management with file descriptors, the same
// with fabric handles, and CUDA IPC. XLA's communicator and its memory windows, which
// would be preferable, are not used for the reasons in docs/gpu.md.
enum class SharingMode { kVmm, kFabric, kIpc };
inline constexpr SharingMode kSharingModes[] = {SharingMode::kVmm, SharingMode::kFabric,
                                                SharingMode::kIpc};
const char* SharingModeName(SharingMode mode);  // "vmm", "fabric" or "ipc"

// A preferred sharing mode, or multicast, that could not be used, and the reason.
struct SharingFallback {
  std::string mode;    // "vmm"
  std::string reason;  // "process 1: cuMemCreate: CUDA_ERROR_NOT_PERMITTED: ..."
  bool operator==(const SharingFallback&) const = default;
};
// The keys of Capabilities. For each sharing mode there is one entry. If the process
// supports the mode, the key is SharingModeName(mode); the value is "yes", or for
// fabric the exported handles. Otherwise the key is CannotKey(mode), and the value is
// the reason.
inline constexpr char kHostKey[] = "host";
// The GPUs of the process's ranks: "uuid,uuid".
inline constexpr char kGpusKey[] = "gpus";
// Pairs of a GPU of this process and a visible GPU that it cannot access:
// "uuid>uuid,...".
inline constexpr char kUnreachableKey[] = "unreachable";
std::string CannotKey(SharingMode mode);

// Multicast is optional and used in addition to a sharing mode. kNvls is the key of a
// process that supports it and the `mode` of its SharingFallback; kCannotNvlsKey is the
// key of a process that does not, with the reason as its value.
inline constexpr char kNvls[] = "nvls";
inline constexpr char kCannotNvlsKey[] = "no nvls";

// Appends `part` to a comma-separated list.
void AppendPart(std::string& list, const std::string& part);

// Converts bytes to hexadecimal text.
std::string HexOf(const void* bytes, size_t size);
// Converts hexadecimal text to bytes. Returns false unless it encodes `size` bytes.
bool ReadHex(const std::string& hex, void* bytes, size_t size);

struct SharingDecision {
  std::vector<SharingMode> modes;  // supported by all processes; in order of preference
  std::vector<SharingFallback> fallbacks;  // the other modes
  std::string rejection;                   // why `modes` is empty; otherwise ""
  bool spans_hosts = false;
};

// Chooses the sharing modes that all processes of a group support. `processes` is
// indexed by rank, and `capabilities_of` is keyed by process. A pure function, so all
// processes make the same decision.
SharingDecision Agree(const std::vector<int>& processes,
                      const std::map<int, Capabilities>& capabilities_of);

// Returns the fallbacks that led to `mode`, in order of preference: modes that some
// process does not support, and modes that all support but that then failed (`failed`).
std::vector<SharingFallback> FallbacksTo(SharingMode mode,
                                         const SharingDecision& decision,
                                         const std::vector<SharingFallback>& failed);
// Returns the error message of a group that has no usable sharing mode: why each mode
// cannot be used. `failed` lists the modes that all processes support but that failed.
std::string RejectionOf(const SharingDecision& decision,
                        const std::vector<SharingFallback>& failed);

// Returns why heaps that are shared by `mode` cannot use multicast, or "".
std::string WhyNoMulticast(SharingMode mode,
                           const std::vector<int>& processes,
                           const std::map<int, Capabilities>& capabilities_of);

// Returns why the GPUs of these processes cannot share memory, or "".
std::string WhyNotConnected(const std::vector<int>& processes,
                            const std::map<int, Capabilities>& capabilities_of);

}  // namespace jax_ub
