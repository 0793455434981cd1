// Ranks on GPUs, of one process or of several: a heap each in device memory, which the
// devices of all ranks reach; and what becomes of them.
//
//   endpoint = CudaEndpoint(driver, own ordinals, slots_bytes, host)    every process
//   address() and offer() go to all processes, by whatever carries strings
//   WhyNotConnected(...) is the same in all of them; if it is empty:
//   communicator = CudaCommunicator::Connect(endpoint, ...)
//
// A process that dies, or says that it failed, ends the waits of the local ranks' devices
// at once, through their error records; the first reason holds, and a communicator that
// failed stays so. Between hosts there are no connections: there a death is noticed by
// the deadline of a wait, and a failure by the peers' flags.
#pragma once

#include <cuda.h>

#include <cstdint>
#include <exception>
#include <map>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "platform/cuda/driver.h"
#include "transport/cuda/capabilities.h"
#include "transport/cuda/cuda_slots.h"
#include "transport/cuda/endpoint.h"
#include "transport/cuda/fault.h"
#include "transport/cuda/heap.h"
#include "transport/cuda/signature_table.h"
#include "transport/process/process_group.h"

namespace jax_ub {

class CudaCommunicator {
 public:
  // All ranks in this process; `ordinals` [rank]; `nvls`: with multicast if there is any.
  // Throws CommunicatorError without room and UnsupportedError where the devices cannot
  // access each other.
  static std::shared_ptr<CudaCommunicator> Make(const Driver& driver,
                                                const std::vector<int>& ordinals,
                                                int64_t slots_bytes,
                                                const std::string& name = "in_process",
                                                bool nvls = false);

  // Exchanges memory with the other processes of the group. `peers` (of this host) and
  // `offers` by process number, the own ones may be left out. Throws UnsupportedError, on
  // all of them, when no way to share is left; DeadlineError, which names the processes
  // that are missing; CommunicatorError when one refused or died.
  static std::shared_ptr<CudaCommunicator> Connect(
      std::unique_ptr<CudaEndpoint> endpoint,
      const GroupMembership& membership,
      const std::map<int, PeerAddress>& peers,
      const std::map<int, Capabilities>& capabilities_of,
      double timeout_s);

  ~CudaCommunicator();  // Close
  CudaCommunicator(const CudaCommunicator&) = delete;
  CudaCommunicator& operator=(const CudaCommunicator&) = delete;

  const std::string& name() const;
  int num_ranks() const;
  const std::vector<int>& local_ranks() const;
  int ordinal(int local_rank) const;  // of its device, in this process
  // "rank 2 (process 1, pid 123)".
  std::string DescribeRank(int rank) const;

  // "in_process", "vmm", "fabric" or "ipc".
  std::string how() const;
  const std::vector<SharingFallback>& fallbacks() const;
  // Whether all ranks' slots have a multicast address: on all ranks or on none.
  bool has_multicast() const;

  // Room for the slots of a call, on each rank; and device memory of this process.
  int64_t slots_bytes() const;
  int64_t size_bytes() const;

  // Where a local rank's device finds the heaps [rank], and its own error record. Both
  // stay as they are until Close.
  std::span<const RankSlotAddress> places(int local_rank) const;
  CUdeviceptr error(int local_rank) const;

  // Places the slots of a call. Throws UnsupportedError when they do not fit, with what
  // to change.
  SlotAddresses Place(int num_slots, int64_t slot_bytes) const;

  // The number of a call site, for its error records; its label is "all_gather_matmul
  // (ub_name 'qkv_fprop')". The same name has the same number.
  uint32_t NumberOf(const CallSiteName& site);

  // What a local rank says of a call, to all ranks that are connected. Poisons, with both
  // sides, where one of them has said what contradicts it, or will. Waits for nobody.
  void Declare(const GpuCallSignature& statement);

  // Why this communicator is of no more use, or nullptr: a device's wait that failed, in
  // words; poison; a process that died; Close. A peer that closed in order is none. While
  // a device has heard of a peer's failure and this process not yet why, only that. Cheap.
  std::exception_ptr failure();
  // The same for every call, which also needs all peers.
  void ThrowIfFailed();

  // In a child of fork, which has no part in this.
  bool IsForkedChild() const;

  // Ends all waits of all ranks from now on; the first reason holds.
  void Poison(const std::exception_ptr& reason);

  // No call may begin any more: ThrowIfFailed says that it was closed.
  void RefuseCalls();

  // Waits until the local devices have done all that they were given, then until all
  // peers have, and gives the memory back. Peers that have died are not waited for; one
  // that does not come within the timeout is left alone (5 s when there is a failure).
  // No call may be enqueued meanwhile. Idempotent.
  void Close();

 private:
  struct State;
  explicit CudaCommunicator(std::unique_ptr<State> state);
  std::unique_ptr<State> state_;
};

}  // namespace jax_ub
