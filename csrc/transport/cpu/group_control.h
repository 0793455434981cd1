// Coordinates the processes of a group by the call log, the call signatures and the
// barriers, which are in control blocks in shared memory. Does not depend on how the
// memory was shared.
#pragma once

#include <cstdint>
#include <deque>
#include <mutex>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "transport/cpu/layout.h"
#include "transport/cpu/peer_status.h"
#include "transport/transport.h"

namespace jax_ub {

// A hash and a description of the call that one process makes. The processes compare
// the hashes to check that all of them make the same call. If the hashes differ, the
// error message contains `text`.
struct CallSignature {
  uint64_t signature = 0;
  std::string text;
};

class GroupControl {
 public:
  // Maximum number of barriers of one call. A collective call needs at most two. The
  // limit is higher because CallSequencer::BarrierSeconds measures many barriers as
  // phases of the latest call.
  static constexpr int kNumPhases = 1 << 24;

  // `headers` has the control blocks of all processes. The first one belongs to the
  // leader, which is the process of rank 0. `own` is the index of this process. This
  // process writes only `headers[own]` and the doorbells of its peers.
  GroupControl(std::vector<ProcessControlBlock*> headers,
               int own,
               const PeerStatus& peer_status);

  // These methods implement the methods of SharedMemoryCommunicator with the same
  // names, which shared_memory.h documents.
  void AppendToCallLog(const CallLogEntry& entry);
  CallLogEntry WaitForLogEntry(int64_t call, const WaitReason& reason);
  void PublishSignature(int64_t call, uint64_t signature, std::string_view text);
  CallSignature call_signature(int process, int64_t call) const;
  bool has_arrived(int process, int64_t call) const;
  void PublishSubmitted(int64_t call, std::string_view text);
  void Barrier(int64_t call, int phase, const WaitReason& reason);

  // Wakes the waiting thread of this process. Must be called after each change of
  // `peer_status`, so that the thread notices a failure or a lost peer.
  void WakeLocalWaits() { Ring(headers_[own_]->doorbell); }

 private:
  void RingOthers();
  std::optional<CallLogEntry> FindLogEntry(int64_t call) const;
  void AppendPending();
  void AppendRemaining();
  uint64_t Arrive(int64_t call, int phase);
  int num_processes() const { return static_cast<int>(headers_.size()); }
  std::string DescribeSubmitted(int process, int64_t call) const;
  bool IsMissing(int process, uint64_t generation) const;
  int FirstMissing(int first, uint64_t generation) const;

  const std::vector<ProcessControlBlock*> headers_;
  const int own_;
  const PeerStatus& peer_status_;

  // Guards `unposted_` and, in the leader, writes to the call log.
  std::mutex call_log_mutex_;
  // Entries for which the call log has no room yet, in the order of the calls.
  std::deque<CallLogEntry> unposted_;
};

}  // namespace jax_ub
