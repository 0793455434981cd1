// A communicator whose ranks belong to several processes of one host. The processes
// share symmetric memory and coordinate their calls through it.
//
// Each process creates one anonymous mapping with a control block and, for each of its
// ranks, slot flags and two buffers of `buffer_bytes` (layout.h). Every process maps
// the memory of all processes. Writes before a barrier are visible to all processes
// after it.
//
// Call n uses the buffers n % 2. A process arrives at Barrier(n, 0) only after it has
// finished call n - 1. Before that barrier, peers may still read the buffers of call
// n - 1, but no longer those of call n - 2. A process can therefore stage data for call
// n in its buffer n % 2 before Barrier(n, 0).
#pragma once

#include <cstddef>
#include <cstdint>
#include <exception>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "platform/mapping.h"
#include "transport/cpu/group_control.h"
#include "transport/cpu/layout.h"
#include "transport/cpu/peer_status.h"
#include "transport/cpu/slots.h"
#include "transport/process/group_failure.h"
#include "transport/process/handshake.h"
#include "transport/process/process_group.h"
#include "transport/transport.h"

namespace jax_ub {

// Executes calls as follows, where n is the number of the call:
//
//   leader (process of rank 0)                      other processes
//   AppendToCallLog(entry)                          entry = WaitForLogEntry(n)
//   stage into buffer(own, n); PublishSignature(n)  the same
//   Barrier(n, 0)                                   Barrier(n, 0)
//   compare call_signature(p, n) of all p           the same
//   read and write buffer(any rank, n)              the same
//   Barrier(n, 1) ...                               Barrier(n, 1) ...
//
// A process whose connection closes without a close message has died. Waits that depend
// on it fail at once. Other waits continue, so a peer that finishes its part of a call
// and exits causes no error. After Poison, every wait in every process fails with the
// first reason, unless its condition is already satisfied.
class SharedMemoryCommunicator {
 public:
  // Maximum number of slots (receive buffers) per rank in one call.
  static constexpr int kMaxSlots = RankHeader::kMaxSlots;

  // Connects to all other processes of the group and maps their memory. `peers` is
  // keyed by process number; an entry of this process is ignored. Throws DeadlineError,
  // which names the missing processes, after the timeout. Throws CommunicatorError if a
  // process refuses or dies.
  static std::shared_ptr<SharedMemoryCommunicator> Connect(
      std::unique_ptr<Endpoint> endpoint,
      GroupMembership membership,
      const std::map<int, PeerAddress>& peers,
      int64_t buffer_bytes,
      double timeout_s);

  ~SharedMemoryCommunicator();  // calls Close, then unmaps the memory
  SharedMemoryCommunicator(const SharedMemoryCommunicator&) = delete;
  SharedMemoryCommunicator& operator=(const SharedMemoryCommunicator&) = delete;

  const std::string& name() const { return group_.name(); }
  int num_ranks() const { return group_.num_ranks(); }
  const std::vector<int>& local_ranks() const { return group_.ranks_of(process()); }
  // Returns the process numbers (JAX's process indices), in the order of the lowest
  // rank of each process. All other methods identify a process by its index in this
  // vector. Index 0 is the leader.
  const std::vector<int>& processes() const { return group_.process_ids(); }
  int num_processes() const { return group_.num_processes(); }
  int process() const { return group_.own(); }
  int process_of_rank(int rank) const { return group_.process_index_of_rank(rank); }
  bool is_leader() const { return process() == 0; }
  // Returns a text such as "ranks 2, 3 (process 1, pid 123)".
  const std::string& DescribeProcess(int process) const {
    return peer_status_.name(process);
  }

  // Returns the buffer that a rank uses in `call`. Each rank has two buffers, for even
  // and odd calls. `rank` may be any rank of the group. The buffer is page-aligned. It
  // is valid as long as this object exists, even if the rank's process has died.
  std::byte* buffer(int rank, int64_t call) const {
    return areas_[rank].memory + call % 2 * buffer_bytes();
  }
  // Returns the size of one buffer, which is the requested size rounded up to whole
  // pages.
  int64_t buffer_bytes() const { return layout_.buffer_bytes(); }
  // Returns the size of the memory that this process shares. It contains the buffers,
  // the slot flags and the control block.
  int64_t size_bytes() const { return memories_[process()].size_bytes(); }

  // Appends a call to the call log, which determines the order of calls in all
  // processes. Only the leader calls this, from any thread. The n-th entry (from 0) is
  // call n. Never blocks: if the log is full, the entry is queued.
  void AppendToCallLog(const CallLogEntry& entry) {
    group_control_.AppendToCallLog(entry);
  }
  // Waits for the leader's log entry of `call` and returns it. Called by all processes
  // except the leader.
  CallLogEntry WaitForLogEntry(int64_t call, const WaitReason& reason) {
    return group_control_.WaitForLogEntry(call, reason);
  }

  // Publishes this process's signature of a call. Must be called before Barrier(call,
  // 0). Peers may read the signature until they arrive at Barrier(call + 1, 0).
  // Truncates `text` to SharedText::kMaxBytes.
  void PublishSignature(int64_t call, uint64_t signature, std::string_view text) {
    group_control_.PublishSignature(call, signature, text);
  }
  CallSignature call_signature(int process, int64_t call) const {
    return group_control_.call_signature(process, call);
  }
  // Returns whether a process has arrived at Barrier(call, 0), so that its signature
  // may be read.
  bool has_arrived(int process, int64_t call) const {
    return group_control_.has_arrived(process, call);
  }
  // Publishes which other calls the ranks of this process have submitted, although
  // `call` is the next call in the log. If they never submit `call`, the error messages
  // of the peers name the other calls. Only the first text for a call has an effect.
  void PublishSubmitted(int64_t call, std::string_view text) {
    group_control_.PublishSubmitted(call, text);
  }

  // Waits until all processes have arrived at this barrier. Must be called by one
  // thread at a time, in ascending order of (call, phase), with
  // 0 <= phase < GroupControl::kNumPhases. A phase may be skipped if all processes skip
  // it. Before the first call, `call` may be -1. If the communicator has failed, throws
  // without arriving.
  void Barrier(int64_t call, int phase, const WaitReason& reason) {
    group_control_.Barrier(call, phase, reason);
  }

  // Returns the transport of a local rank, whose slots are in the buffers of `call`.
  // The transport may be used from Barrier(call, 0) to Barrier(call + 1, 0). Throws
  // UnsupportedError if the slots do not fit into a buffer.
  Transport& rank(int local_rank, int64_t call, int num_slots, int64_t slot_bytes);

  // Makes all pending and later waits in all processes fail with `reason`. Only the
  // first reason has an effect. Peers receive the message of `reason`, as a
  // DeadlineError if `reason` is one, and otherwise as a CommunicatorError.
  void Poison(const std::exception_ptr& reason) { failure_.Poison(reason); }
  // Returns the failure of this communicator, or nullptr. A communicator fails by
  // Poison, by the death of a process, or by Close. If a peer closes its communicator
  // without a failure, only the waits for this peer fail.
  std::exception_ptr poison() const { return failure_.reason(); }
  // Registers a callback, which is called once with the failure when the communicator
  // fails. It runs on the thread that calls Poison or Close, or on the thread that
  // detects the failure of a peer. If the communicator has already failed, OnPoison
  // itself calls it. The callback must not call Close or hold the last reference to
  // this object.
  void OnPoison(std::function<void(const std::exception_ptr&)> callback) {
    failure_.OnReason(std::move(callback));
  }

  // Tells the peers that this process closes the communicator, and makes the pending
  // waits of this process fail. Never blocks, even if a peer is stopped or dead. The
  // memory stays mapped until the destructor runs. Idempotent.
  void Close() { failure_.Close(); }

 private:
  // `connected_peers` is the result of Handshake::Run.
  SharedMemoryCommunicator(ProcessGroup group,
                           const Layout& layout,
                           std::vector<SharedMapping> memories,
                           std::vector<ConnectedPeer> connected_peers);

  void WakeLocalWaits();

  const ProcessGroup group_;
  const Layout layout_;
  std::vector<SharedMapping> memories_;  // indexed by process
  PeerStatus peer_status_;
  GroupControl group_control_;
  std::vector<RankMemory> areas_;  // indexed by rank
  // The transports of the local ranks. Indexed by rank; null for ranks of other
  // processes.
  std::vector<std::unique_ptr<SlotTransport>> ends_;

  // Declared last, so that it is destroyed first: its thread uses the members above.
  GroupFailure failure_;
};

}  // namespace jax_ub
