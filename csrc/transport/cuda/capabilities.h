// The modes in which processes may share device memory, and the choice of a mode for a
// group of processes.
#pragma once

#include <cstddef>
#include <map>
#include <string>
#include <vector>

namespace jax_ub {

// The features that a process supports, such as sharing modes. The process sends them
// to the other processes before they connect. For a feature that the process lacks, the
// map has the reason. The size is a few kilobytes.
using Capabilities = std::map<std::string, std::string>;

// The ways in which processes share device memory, in order of preference. kVmm and
// kFabric use the driver's virtual memory management: kVmm passes file descriptors,
// kFabric passes fabric handles, which also work across hosts. kIpc uses CUDA IPC.
// docs/gpu.md explains why XLA's communicator is not used.
enum class SharingMode { kVmm, kFabric, kIpc };
inline constexpr SharingMode kSharingModes[] = {SharingMode::kVmm, SharingMode::kFabric,
                                                SharingMode::kIpc};
const char* SharingModeName(SharingMode mode);  // "vmm", "fabric" or "ipc"

// A feature that a group does not use, and the reason. The feature is multicast, or a
// sharing mode that is preferred to the mode that the group uses.
struct SharingFallback {
  std::string mode;    // "vmm"
  std::string reason;  // "process 1: cuMemCreate: CUDA_ERROR_NOT_PERMITTED: ..."
  bool operator==(const SharingFallback&) const = default;
};
// The following constants are keys of Capabilities. A process that supports a sharing
// mode has the key SharingModeName(mode), with the value "yes" or, for kFabric, the
// exported handles. Otherwise it has the key CannotKey(mode), with the reason as its
// value. The value of kHostKey is a text that identifies the host of the process.
inline constexpr char kHostKey[] = "host";
// The UUIDs of the GPUs of this process's ranks: "uuid,uuid".
inline constexpr char kGpusKey[] = "gpus";
// Pairs of a GPU of this process and a visible GPU to which it has no peer access:
// "uuid>uuid,...".
inline constexpr char kUnreachableKey[] = "unreachable";
std::string CannotKey(SharingMode mode);

// Multicast (NVLS) is optional, and is used together with a sharing mode. A process
// that supports multicast has the key kNvls in its Capabilities. Another process has
// the key kCannotNvlsKey, with the reason as its value. kNvls is also the `mode` of a
// SharingFallback.
inline constexpr char kNvls[] = "nvls";
inline constexpr char kCannotNvlsKey[] = "no nvls";

// Appends `item` to a comma-separated list, such as the value of kGpusKey.
void AppendItem(std::string& list, const std::string& item);

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
// indexed by rank, and `capabilities_of` is keyed by process. The result depends only
// on the arguments, so all processes get the same result.
SharingDecision Agree(const std::vector<int>& processes,
                      const std::map<int, Capabilities>& capabilities_of);

// Returns the sharing modes that are preferred to `mode` but not used, with the
// reasons. `decision` has the modes that some process does not support. `failed` has
// the modes that all processes support, but that failed when they were tried.
std::vector<SharingFallback> FallbacksTo(SharingMode mode,
                                         const SharingDecision& decision,
                                         const std::vector<SharingFallback>& failed);
// Returns the error message of a group that cannot use any sharing mode, with the
// reason for each mode. `failed` has the modes that failed although all processes
// support them.
std::string RejectionOf(const SharingDecision& decision,
                        const std::vector<SharingFallback>& failed);

// Returns why multicast cannot be used with heaps that are shared by `mode`, or "" if
// it can be used.
std::string WhyNoMulticast(SharingMode mode,
                           const std::vector<int>& processes,
                           const std::map<int, Capabilities>& capabilities_of);

// Returns why the GPUs of these processes cannot share memory, or "" if they can.
std::string WhyNotConnected(const std::vector<int>& processes,
                            const std::map<int, Capabilities>& capabilities_of);

}  // namespace jax_ub
