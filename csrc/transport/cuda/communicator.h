// A communicator whose ranks run on GPUs, in one process or in several. Each rank has a
// heap in device memory that the devices of all ranks can access.
//
// To connect several processes, every process makes
//   endpoint = CudaEndpoint(driver, own ordinals, slots_bytes, host)
// and sends endpoint.address() and endpoint.capabilities() to all processes, for
// example through JAX's key-value store. WhyNotConnected returns the same text in all
// of them. If it is empty, every process calls
//   communicator = CudaCommunicator::Connect(endpoint, ...)
//
// If a process dies or reports a failure, the waits of the local ranks' devices end at
// once, through their error records. The first reason is kept, and a failed
// communicator cannot be used again. Processes of different hosts have no connections:
// there, the deadline of a wait detects a death, and the ranks' `poison` words report a
// failure.
#pragma once

#include <cuda.h>

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <exception>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "platform/cuda/driver.h"
#include "platform/deadline.h"
#include "transport/cuda/capabilities.h"
#include "transport/cuda/cuda_slots.h"
#include "transport/cuda/endpoint.h"
#include "transport/cuda/fault.h"
#include "transport/cuda/group_heaps.h"
#include "transport/cuda/heap.h"
#include "transport/cuda/signature_table.h"
#include "transport/process/group_failure.h"
#include "transport/process/handshake.h"
#include "transport/process/process_group.h"

namespace jax_ub {

class CudaCommunicator {
 public:
  // Makes a communicator whose ranks are all in this process. Rank r has the device
  // with ordinal `ordinals[r]`. With `nvls`, uses multicast if the devices support it.
  // Throws CommunicatorError if a device is out of memory, and UnsupportedError if
  // devices cannot access each other.
  static std::shared_ptr<CudaCommunicator> Make(const Driver& driver,
                                                const std::vector<int>& ordinals,
                                                int64_t slots_bytes,
                                                const std::string& name = "in_process",
                                                bool nvls = false);

  // Connects to the other processes of the group and maps their heaps. `peers` has the
  // processes of this host, and `capabilities_of` has all processes. Both are keyed by
  // process number; entries of this process are ignored. Throws UnsupportedError in all
  // processes if no sharing mode works, DeadlineError with the missing processes, or
  // CommunicatorError if a process refuses or dies.
  static std::shared_ptr<CudaCommunicator> Connect(
      std::unique_ptr<CudaEndpoint> endpoint,
      const GroupMembership& membership,
      const std::map<int, PeerAddress>& peers,
      const std::map<int, Capabilities>& capabilities_of,
      double timeout_s);

  ~CudaCommunicator();  // calls Close
  CudaCommunicator(const CudaCommunicator&) = delete;
  CudaCommunicator& operator=(const CudaCommunicator&) = delete;

  const std::string& name() const { return group_.name(); }
  int num_ranks() const { return group_.num_ranks(); }
  const std::vector<int>& local_ranks() const { return group_.ranks_of(group_.own()); }
  // Returns the device ordinal of a local rank, which is valid in this process.
  int ordinal(int local_rank) const {
    return heaps_.devices().ordinal(OwnIndexOf(local_rank));
  }
  // Returns a text such as "rank 2 (process 1, pid 123)".
  std::string DescribeRank(int rank) const;

  // Returns how the ranks access each other's heaps: "in_process", "vmm" (file
  // descriptors), "fabric" (fabric handles) or "ipc" (CUDA IPC).
  const std::string& sharing_mode() const { return heaps_.sharing_mode(); }
  // Returns the features that this group does not use, with the reasons. These are the
  // sharing modes that are preferred to sharing_mode(), and multicast if it was
  // requested.
  const std::vector<SharingFallback>& fallbacks() const { return heaps_.fallbacks(); }
  // Returns whether the slots have a multicast address. All ranks get the same answer.
  bool has_multicast() const { return heaps_.multicast() != 0; }

  // Returns the size in bytes of the memory in which each rank has the slots (receive
  // buffers) of a call.
  int64_t slots_bytes() const { return layout_.slots_bytes(); }
  // Returns how much device memory this process has allocated for the heaps of its
  // ranks, in bytes.
  int64_t size_bytes() const { return size_bytes_; }

  // Returns the addresses of all ranks' heaps, indexed by rank. They are valid on the
  // device of `local_rank` until Close.
  std::span<const RankSlotAddress> addresses(int local_rank) const {
    return heaps_.addresses(OwnIndexOf(local_rank));
  }
  // Returns the device address of a local rank's ErrorRecord, in which its kernels
  // record a failure. Constant until Close.
  CUdeviceptr error(int local_rank) const {
    return heaps_.devices().record_address(OwnIndexOf(local_rank));
  }

  // Returns the addresses of the slots of a call. Throws UnsupportedError, which says
  // what to change, if they do not fit into slots_bytes().
  SlotAddresses AddressSlots(int num_slots, int64_t slot_bytes) const;

  // Returns the number that identifies a call site in the error records of this
  // process. Equal call sites have the same number.
  uint32_t NumberOf(const CallSiteName& site);

  // Sends a local rank's signature of a call to all connected processes, without
  // waiting. If the signature contradicts the signature of another rank, which may
  // arrive earlier or later, poisons the communicator with an error that describes
  // both.
  void Declare(const GpuCallSignature& signature);

  // Returns the failure of this communicator, or nullptr. A failure is a failed wait of
  // a device, a poison, the death of a process, or Close. A peer that closes its
  // communicator is not a failure. If a local device only knows that the device of a
  // peer has failed, and the peer's host has not sent the cause yet, this function
  // waits up to 5 s for the cause, once. If the cause does not arrive, the error only
  // names the peer. Without a failure, this function takes little time.
  std::exception_ptr failure();
  // Throws the failure, if there is one. Also throws after RejectCalls. Also throws
  // after a peer has closed its communicator, because every call needs all peers.
  void ThrowIfFailed();

  // Returns whether this process was forked from the process that created the
  // communicator. A forked child must not use the communicator.
  bool IsForkedChild() const { return failure_.IsForkedChild(); }

  // Makes all pending and later waits of all ranks fail with `reason`. Only the first
  // call has an effect.
  void Poison(const std::exception_ptr& reason) { failure_.Poison(reason); }

  // Makes ThrowIfFailed report that the communicator is closed, so that no call begins.
  void RejectCalls() { rejects_calls_.store(true); }

  // Closes the communicator. Waits until the local devices have finished all enqueued
  // work, sends a failure of these devices that no call has reported, waits until all
  // peers have closed or died, and frees the memory. The wait for peers has the timeout
  // of Connect, or 5 s after a failure; after the timeout, Close continues without
  // them. No call may be enqueued during Close. Idempotent.
  void Close();

 private:
  CudaCommunicator(ProcessGroup group,
                   const HeapLayout& layout,
                   GroupHeaps heaps,
                   std::vector<ConnectedPeer> connected_peers,
                   double timeout_s);

  std::string NameAndStateOf(int rank) const;
  const ErrorRecord* FilledRecord() const;
  std::exception_ptr FaultOf(const ErrorRecord& record);
  bool KnowsCauseOf(const ErrorRecord& record);
  bool AwaitCause();
  void FailWaits();
  void SetLost(int process_index, const std::string& how);
  void Add(const GpuCallSignature& signature);
  void OnSignature(const PeerEvent& event);
  std::string CallOf(uint32_t tag);

  ErrorRecord& record(int n) const { return heaps_.devices().record(n); }
  int OwnIndexOf(int rank) const {
    const std::vector<int>& own = local_ranks();
    return static_cast<int>(std::find(own.begin(), own.end(), rank) - own.begin());
  }
  int num_own() const { return heaps_.devices().num_ranks(); }

  const ProcessGroup group_;
  const HeapLayout layout_;
  const double timeout_s_;
  GroupHeaps heaps_;
  const int64_t size_bytes_;
  // What the handshake has found out about each process, such as its pid. Indexed by
  // process index. The constructor moves the sockets to `failure_`, which watches them.
  std::vector<ConnectedPeer> connected_peers_;
  std::atomic<bool> rejects_calls_{false};
  std::atomic<bool> is_closed_{false};

  std::mutex mutex_;                      // guards the members below, except `failure_`
  int num_connected_ = 0;                 // peers that have neither died nor closed
  std::condition_variable disconnected_;  // notified when num_connected_ decreases
  std::string who_closed_;                // the first peer that closed in order; or ""
  std::atomic<bool> has_closed_{
      false};                        // whether who_closed_ is set; read without mutex_
  std::vector<CallSiteName> sites_;  // indexed by call site number
  // Descriptions of the calls whose signatures were sent or received. Keyed by tag.
  std::map<uint32_t, std::string> calls_;
  SignatureTable signatures_;
  std::optional<Deadline> cause_deadline_;  // set by the first AwaitCause

  // Declared last, so that it is destroyed first: its thread uses the members above.
  GroupFailure failure_;
};

}  // namespace jax_ub
