// Coordinates the processes of a group through the control blocks in their shared
// memory: the call log, the call signatures and the barriers. Independent of how the
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

// A hash and a description of a call, as one process makes it. Processes compare the
// hashes to check that all make the same call; `text` is for the error if they do not.
struct CallSignature {
  uint64_t signature = 0;
  std::string text;
};

class GroupControl {
 public:
  // The maximum number of barriers of one call. Calls have at most two; the others are
  // those of CallSequencer::BarrierSeconds.
  static constexpr int kNumPhases = 1 << 24;

  // `headers` are the control blocks of all processes, first that of the leader (the
  // process of rank 0). This process only writes `headers[own]`, and the doorbells of
  // its peers.
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

  // Wakes the waiting thread of this process after a change of `peer_status`, so that
  // it notices a failure or a lost peer.
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
