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

// What a process publishes about a call, so that its peers can check that they make the
// same call.
struct CallSignature {
  uint64_t signature = 0;
  std::string text;
};

class GroupControl {
 public:
  // `headers` is indexed by process; process 0 is the leader. Writes only to
  // `headers[own]`, except for ringing the peers' doorbells.
  GroupControl(std::vector<ProcessControlBlock*> headers,
               int own,
               const PeerStatus& peer_status);

  // SharedMemoryCommunicator documents these methods under the same names.
  void AppendToCallLog(const CallLogEntry& order);
  CallLogEntry WaitForLogEntry(int64_t call, const WaitReason& reason);
  void PublishSignature(int64_t call, uint64_t signature, std::string_view text);
  CallSignature call_signature(int process, int64_t call) const;
  void Barrier(int64_t call, int phase, const WaitReason& reason);

  // Wakes this process's waits so that they check the peer status again.
  void WakeLocalWaits() { Ring(headers_[own_]->doorbell); }

 private:
  void RingOthers();
  std::optional<CallLogEntry> FindLogEntry(int64_t call) const;
  void AppendPending();
  void AppendRemaining();
  uint64_t Arrive(int64_t call, int phase);
  int num_processes() const { return static_cast<int>(headers_.size()); }
  bool IsMissing(int process, uint64_t generation) const;
  int FirstMissing(int first, uint64_t generation) const;

  const std::vector<ProcessControlBlock*> headers_;
  const int own_;
  const PeerStatus& peer_status_;

  // Guards `unposted_`, and the writes to the call log if this process is the leader.
  std::mutex order_mutex_;
  // Entries for the call log that have to wait until the log has room for them.
  std::deque<CallLogEntry> unposted_;
};

}  // namespace jax_ub
