// How processes keep together, through the headers of their shared memory: the order of
// the calls, what each says about a call, barriers. Knows nothing of how the memory
// came to be shared.
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

// What a process said about a call.
struct CallSignature {
  uint64_t signature = 0;
  std::string text;
};

class GroupControl {
 public:
  // `headers` [process]; process 0 is the leader. Only `own` is written here.
  GroupControl(std::vector<ProcessControlBlock*> headers,
               int own,
               const PeerStatus& peer_status);

  // SharedMemoryCommunicator's header says what these do.
  void AppendToCallLog(const CallLogEntry& order);
  CallLogEntry WaitForLogEntry(int64_t call, const WaitReason& reason);
  void PublishSignature(int64_t call, uint64_t signature, std::string_view text);
  CallSignature call_signature(int process, int64_t call) const;
  void Barrier(int64_t call, int phase, const WaitReason& reason);

  // Makes this process look at its fate again.
  void WakeLocalWaits() { Ring(headers_[own_]->doorbell); }

 private:
  void RingOthers();
  std::optional<CallLogEntry> FindLogEntry(int64_t call) const;
  void AppendPending();
  void AppendRemaining();
  uint64_t Arrive(int64_t call, int phase);
  int num_processes() const { return static_cast<int>(headers_.size()); }
  bool IsMissing(int process, uint64_t place) const;
  int FirstMissing(int first, uint64_t place) const;

  const std::vector<ProcessControlBlock*> headers_;
  const int own_;
  const PeerStatus& peer_status_;

  std::mutex order_mutex_;  // guards what follows, and the own orders
  std::deque<CallLogEntry> unposted_;
};

}  // namespace jax_ub
