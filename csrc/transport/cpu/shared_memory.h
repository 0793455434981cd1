// Ranks in several processes of one host: symmetric memory, and what the processes say
// to each other through it.
//
// Each process has one anonymous mapping with a header and, per rank of its own, an
// area: slot flags and two *buffers* of buffer_bytes. Every process maps all of them. Call
// n uses the buffers n % 2, and Barrier(n, 0) says that this process has ended call
// n - 1. So whatever a process writes into a buffer before Barrier(n, 0) meets no reader
// of the call before, and what it wrote before a barrier is visible behind it.
//
//   leader (process of rank 0)              others
//   AppendToCallLog(order)                        order = WaitForLogEntry(n)
//   stage into buffer(own, n); PublishSignature(n)    the same
//   Barrier(n, 0)                           Barrier(n, 0)
//   announcement(p, n) of all p agree?      the same
//   read buffer(any, n), store into it ...    the same
//   Barrier(n, 1) ...                       Barrier(n, 1) ...
//
// A process whose connection closes without a goodbye has died: waits for it fail at
// once, all other waits go on, so that a peer that did its part and exited does no
// harm. Poison fails every wait of every process, with the first reason. Waits look for
// their condition first: one whose condition holds never fails.
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
  // A call may have this many slots; flags for them lie in each area.
  static constexpr int kMaxSlots = RankHeader::kMaxSlots;

  // Exchanges memory with every other process of the group. `peers` by process number;
  // the own one may be left out. Throws DeadlineError, which names the processes that
  // are missing, and CommunicatorError when one of them refused or died.
  static std::shared_ptr<SharedMemoryCommunicator> Connect(
      std::unique_ptr<Endpoint> endpoint,
      GroupMembership membership,
      const std::map<int, PeerAddress>& peers,
      int64_t buffer_bytes,
      double timeout_s);

  ~SharedMemoryCommunicator();  // Close, then gives the memory back
  SharedMemoryCommunicator(const SharedMemoryCommunicator&) = delete;
  SharedMemoryCommunicator& operator=(const SharedMemoryCommunicator&) = delete;

  const std::string& name() const;
  int num_ranks() const;
  const std::vector<int>& local_ranks() const;
  // The processes' numbers in the order of their lowest ranks. Below, `process` is a
  // place in this order: 0 is the leader.
  const std::vector<int>& processes() const;
  int num_processes() const;
  int process() const;
  int process_of_rank(int rank) const;
  bool is_leader() const;
  // "rank 2 (process 1, pid 123)", "ranks 2, 3 (process 1, pid 123)".
  std::string DescribeProcess(int process) const;

  // Of any rank. Aligned to a page. Valid while this object lives, whoever has died.
  std::byte* buffer(int rank, int64_t call) const;
  int64_t buffer_bytes() const;  // as asked for, rounded up to a page
  int64_t size_bytes() const;  // memory of this process: all buffers, flags and header

  // The leader's calls, in the order in which all shall run them, from any thread, any
  // number ahead. Call numbers count from 0 on.
  void AppendToCallLog(const CallLogEntry& order);
  // The others: what the leader posted as this call.
  CallLogEntry WaitForLogEntry(int64_t call, const WaitReason& reason);

  // What peers shall compare, before Barrier(call, 0); readable from there to the next
  // call's Barrier(call + 1, 0). Texts longer than SignatureRecord's are cut.
  void PublishSignature(int64_t call, uint64_t signature, std::string_view text);
  CallSignature call_signature(int process, int64_t call) const;

  // Returns when every process has come here. One thread at a time, calls and phases
  // (0 to 15) in ascending order; a phase may be left out if all leave it out. Throws
  // without having come when there is poison.
  void Barrier(int64_t call, int phase, const WaitReason& reason);

  // The end of a rank of this process, with slots in the buffers of this call: behind
  // Barrier(call, 0), until the next call's. Throws UnsupportedError when they do not
  // fit.
  Transport& rank(int local_rank, int64_t call, int num_slots, int64_t slot_bytes);

  // Fails every wait in every process from now on; the first reason holds. Keeps its
  // text and, for DeadlineError, its type.
  void Poison(const std::exception_ptr& reason);
  // Why this communicator is of no more use: poison, a process that died, Close. A peer
  // that closed in order is none, though waits for it fail.
  std::exception_ptr poison() const;
  // Called once, when poison() begins to be something, from the thread that noticed;
  // at once if it is already; from a peer's message not after Close. It may not call
  // Close, nor hold the last reference to this object.
  void OnPoison(std::function<void(const std::exception_ptr&)> callback);

  // Says goodbye to the peers and fails the own waits that are left. Never blocks on a
  // peer, dead, stopped or alive. The memory stays until the destructor. Idempotent.
  void Close();

 private:
  struct State;
  explicit SharedMemoryCommunicator(std::unique_ptr<State> state);
  std::unique_ptr<State> state_;
};

}  // namespace jax_ub
