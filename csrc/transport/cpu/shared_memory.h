// A communicator whose ranks belong to several processes of one host. The processes
// share symmetric memory and coordinate their calls through it.
//
// Each process creates one anonymous mapping with a control block and, for each of its
// ranks, slot flags and two buffers of `buffer_bytes` (layout.h). Every process maps
// the memory of all processes. Writes before a barrier are visible to all processes
// after it.
//
// Call n uses the buffers n % 2. A process arrives at Barrier(n, 0) only after it has
// finished call n - 1. Before that barrier, peers may still read the buffers of call n
// - 1, but no longer those of call n - 2. A process can therefore stage data for call n
// in its buffer n % 2 before Barrier(n, 0).
//
//   leader (process of rank 0)                      other processes
//   AppendToCallLog(order)                          order = WaitForLogEntry(n)
//   stage into buffer(own, n); PublishSignature(n)  the same
//   Barrier(n, 0)                                   Barrier(n, 0)
//   compare call_signature(p, n) of all p           the same
//   read and write buffer(any rank, n)              the same
//   Barrier(n, 1) ...                               Barrier(n, 1) ...
//
// A process whose connection closes without a close message has died. Waits that depend
// on it fail at once; all other waits continue, so a peer that finished its part of a
// call and exited causes no error. Poison makes every wait in every process fail with
// the first reason. A wait checks its condition before it checks for failure, so a
// satisfied wait never fails.
#pragma once

#include <cstddef>
#include <cstdint>
#include <exception>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "transport/cpu/group_control.h"
#include "transport/cpu/layout.h"
#include "transport/process/endpoint.h"
#include "transport/process/process_group.h"
#include "transport/transport.h"

namespace jax_ub {

class SharedMemoryCommunicator {
 public:
  // The largest number of slots that one call can use.
  static constexpr int kMaxSlots = RankHeader::kMaxSlots;

  // Connects to all other processes of the group and maps their memory. `peers` is
  // keyed by process number and need not contain this process. Throws DeadlineError,
  // which names the missing processes, and CommunicatorError if a process refuses or
  // dies.
  static std::shared_ptr<SharedMemoryCommunicator> Connect(
      std::unique_ptr<Endpoint> endpoint,
      GroupMembership membership,
      const std::map<int, PeerAddress>& peers,
      int64_t buffer_bytes,
      double timeout_s);

  ~SharedMemoryCommunicator();  // calls Close, then unmaps the memory
  SharedMemoryCommunicator(const SharedMemoryCommunicator&) = delete;
  SharedMemoryCommunicator& operator=(const SharedMemoryCommunicator&) = delete;

  const std::string& name() const;
  int num_ranks() const;
  const std::vector<int>& local_ranks() const;
  // Returns the process numbers, ordered by each process's lowest rank. All other
  // methods identify a process by its index in this vector; index 0 is the leader.
  const std::vector<int>& processes() const;
  int num_processes() const;
  int process() const;
  int process_of_rank(int rank) const;
  bool is_leader() const;
  // Returns, for example, "ranks 2, 3 (process 1, pid 123)".
  std::string DescribeProcess(int process) const;

  // Returns the buffer that `call` uses, of any rank of the group. Aligned to a page.
  // Valid as long as this object, even if the rank's process has died.
  std::byte* buffer(int rank, int64_t call) const;
  // Returns the size of one buffer: the requested size, rounded up to whole pages.
  int64_t buffer_bytes() const;
  // Returns the size of this process's mapping: its buffers, flags and control block.
  int64_t size_bytes() const;

  // Appends a call to the log that sets the order of calls in all processes. Called by
  // the leader only, from any thread. Never blocks: entries that do not fit into the
  // shared log are queued. The n-th entry is call n, counted from 0.
  void AppendToCallLog(const CallLogEntry& order);
  // Waits for the log entry of `call` and returns it. Called by all processes except
  // the leader.
  CallLogEntry WaitForLogEntry(int64_t call, const WaitReason& reason);

  // Publishes this process's signature of a call. Called before Barrier(call, 0). Peers
  // may read it from Barrier(call, 0) until they arrive at Barrier(call + 1, 0).
  // Truncates `text` to SignatureRecord::kMaxBytes.
  void PublishSignature(int64_t call, uint64_t signature, std::string_view text);
  CallSignature call_signature(int process, int64_t call) const;

  // Waits until every process has arrived at this barrier. Called by one thread at a
  // time, in ascending order of call and phase (0 to 15). A phase may be skipped if all
  // processes skip it. If the communicator is poisoned, throws without arriving.
  void Barrier(int64_t call, int phase, const WaitReason& reason);

  // Returns the transport of a local rank, with its slots in the buffers of `call`.
  // Usable from Barrier(call, 0) until the next call's barrier 0. Throws
  // UnsupportedError if the slots do not fit.
  Transport& rank(int local_rank, int64_t call, int num_slots, int64_t slot_bytes);

  // Makes every pending and future wait in every process fail with `reason`. Only the
  // first reason takes effect. Peers get its text and, for DeadlineError, its type.
  void Poison(const std::exception_ptr& reason);
  // Returns why this communicator can no longer be used, or nullptr: the poison, the
  // death of a process, or Close. A peer that closed in order is not a failure,
  // although waits for it fail.
  std::exception_ptr poison() const;
  // Sets the callback that is called once, when poison() becomes non-null, by the
  // thread that noticed the failure. Called immediately if poison() is already
  // non-null. Not called for a peer's message after Close. The callback must neither
  // call Close nor hold the last reference to this object.
  void OnPoison(std::function<void(const std::exception_ptr&)> callback);

  // Sends the close message to the peers and fails the pending waits of this process.
  // Never blocks on a peer, even if the peer is stopped or dead. The memory stays
  // mapped until the destructor runs. Idempotent.
  void Close();

 private:
  struct State;
  explicit SharedMemoryCommunicator(std::unique_ptr<State> state);
  std::unique_ptr<State> state_;
};

}  // namespace jax_ub
