// The modes in which processes may share device memory, and the choice of one for a
// group.
#pragma once

#include <cstddef>
#include <map>
#include <string>
#include <vector>

namespace jax_ub {

// What a process sends to the others before they connect: the sharing modes that it
// supports, and for the other modes the reason. A few kilobytes of text.
using Capabilities = std::map<std::string, std::string>;

// How processes share device memory, in order of preference: virtual memory management
// with file descriptors, the same with fabric handles (across hosts), CUDA IPC.
// docs/gpu.md explains why XLA's communicator is not used.
enum class SharingMode { kVmm, kFabric, kIpc };
inline constexpr SharingMode kSharingModes[] = {SharingMode::kVmm, SharingMode::kFabric,
                                                SharingMode::kIpc};
const char* SharingModeName(SharingMode mode);  // "vmm", "fabric" or "ipc"

// A preferred sharing mode, or multicast, that is not used, and the reason.
struct SharingFallback {
  std::string mode;    // "vmm"
  std::string reason;  // "process 1: cuMemCreate: CUDA_ERROR_NOT_PERMITTED: ..."
  bool operator==(const SharingFallback&) const = default;
};
// The keys of Capabilities, which a process sends to its peers before they connect. A
// process that supports a sharing mode has the key SharingModeName(mode), with the
// value "yes" or, for kFabric, the exported handles. Otherwise it has the key
// CannotKey(mode), with the reason as its value.
inline constexpr char kHostKey[] = "host";
// The UUIDs of the GPUs of this process's ranks: "uuid,uuid".
inline constexpr char kGpusKey[] = "gpus";
// Pairs of a GPU of this process and a visible GPU to which it has no peer access:
// "uuid>uuid,...".
inline constexpr char kUnreachableKey[] = "unreachable";
std::string CannotKey(SharingMode mode);

// Multicast (NVLS) is optional, and used in addition to a sharing mode. A process that
// supports it has the key kNvls; another process has the key kCannotNvlsKey, with the
// reason as its value. kNvls is also the `mode` of a SharingFallback.
inline constexpr char kNvls[] = "nvls";
inline constexpr char kCannotNvlsKey[] = "no nvls";

// Appends `part` to a comma-separated list, such as the value of kGpusKey.
void AppendPart(std::string& list, const std::string& part);

// Returns the bytes as hexadecimal digits.
std::string HexOf(const void* bytes, size_t size);
// Decodes hexadecimal digits into `bytes`. Returns false unless they encode exactly
// `size` bytes.
bool ReadHex(const std::string& hex, void* bytes, size_t size);

struct SharingDecision {
  std::vector<SharingMode> modes;  // supported by all processes; in order of preference
  std::vector<SharingFallback> fallbacks;  // the other modes
  std::string rejection;                   // why `modes` is empty; otherwise ""
  bool spans_hosts = false;
};

// Returns the sharing modes that all processes of a group support. `processes` is
// indexed by rank, and `capabilities_of` is keyed by process. Depends only on its
// arguments, so that all processes get the same answer.
SharingDecision Agree(const std::vector<int>& processes,
                      const std::map<int, Capabilities>& capabilities_of);

// Returns the sharing modes that are preferred to `mode` but not used, with reasons:
// some process does not support them, or they failed although all support them
// (`failed`).
std::vector<SharingFallback> FallbacksTo(SharingMode mode,
                                         const SharingDecision& decision,
                                         const std::vector<SharingFallback>& failed);
// Returns the error text of a group that cannot use any sharing mode, with the reason
// for each mode. `failed` has the modes that failed although all processes support
// them.
std::string RejectionOf(const SharingDecision& decision,
                        const std::vector<SharingFallback>& failed);

// Returns why heaps shared by `mode` cannot use multicast, or "" if they can.
std::string WhyNoMulticast(SharingMode mode,
                           const std::vector<int>& processes,
                           const std::map<int, Capabilities>& capabilities_of);

// Returns why the GPUs of these processes cannot share memory, or "" if they can.
std::string WhyNotConnected(const std::vector<int>& processes,
                            const std::map<int, Capabilities>& capabilities_of);

}  // namespace jax_ub
