// Calls on GPUs. XLA asks for each on its device's launch thread, in the same order on
// every rank: so ranks need no matching on the host. Where several host threads launch
// programs in different orders, the waits of the calls fail (cuda_slots.h). Initialize
// comes before every run of a program, Execute enqueues a call, or is captured once and
// then replayed without it.
#pragma once

#include <cuda.h>

#include <array>
#include <atomic>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <set>
#include <string>
#include <unordered_map>
#include <vector>

#include "engine/call.h"
#include "engine/cuda/cuda_device.h"
#include "engine/cuda/dry_run_device.h"
#include "engine/cuda/gpu.h"
#include "gemm/cuda/cublaslt.h"
#include "platform/cuda/driver.h"
#include "transport/cuda/communicator.h"

namespace jax_ub {

// Executions of one custom call of one compiled program, on all devices of this process.
class CudaCallSite {
 public:
  // Throws std::invalid_argument for attributes that no op has, UnsupportedError for what
  // does not run on GPUs.
  explicit CudaCallSite(CallAttributes attributes);

  const CallAttributes& attributes() const { return attributes_; }

 private:
  friend class CudaEngine;

  struct Place {
    int group = 0;
    int rank = 0;
    bool has_peers = false;
    uint32_t partition = 0;  // where Attributes::devices are given
  };
  // What Initialize found out for a device.
  struct Preparation {
    Place place;
    std::vector<int> alignments;  // of the tensors that the products were planned for
    uint32_t tag = 0;             // GpuCallSignature::tag, where it has peers
    CallPlan plan;
    std::optional<WorkspacePlan> by_multicast;  // where it may reduce so
    GemmOptions options;
    Gpu* gpu = nullptr;
  };
  // The communicator of a group. Captured graphs hold its addresses, so that another one
  // may take its place only while nothing has been captured.
  struct Binding {
    std::shared_ptr<CudaCommunicator> communicator;
    uint32_t number = 0;  // of the call site, there
    bool captured = false;
    // Why it could not be made, for the ranks that have not heard it yet.
    std::exception_ptr refusal;
    std::set<int> who_heard;
  };

  const CallAttributes attributes_;
  const std::unordered_map<int64_t, size_t>
      flat_ranks_;    // FlatRankOfDevice the attributes
  std::mutex mutex_;  // guards all below
  std::map<int, std::shared_ptr<const Preparation>> preparations_;  // by ordinal
  std::map<int, Binding> bindings_;                                 // by group
  std::map<int, std::weak_ptr<CudaCommunicator>> declared_;  // to whom, by ordinal
  std::string name_;  // the same in every process that knows the call site
};

struct CudaCounters {
  std::array<int64_t, kNumOps> calls = {};  // enqueued or captured
  int64_t failed_calls = 0;                 // that were refused on the host
  int64_t heap_bytes = 0;                   // of communicators that exist
};

class CudaEngine {
 public:
  // Both outlive it. Touches no device.
  CudaEngine(const Driver& driver, const CublasLt& library, double timeout_s);

  // What Python asks for while it lowers a call, whose tensors have no data: the largest
  // need of any rank. Needs no device.
  static int64_t WorkspaceBytes(const CallAttributes& attributes, const RankCall& call);

  // Finds or makes the communicator, plans products, loads kernels; cheap when nothing
  // has changed. Throws what failed in an earlier call of the communicator. The first time
  // it says to the peers what this rank means by the call, or why it refuses it: where
  // they contradict each other, the communicator fails. Waits for no peer.
  void Initialize(CudaCallSite& site, int ordinal, const RankCall& call);
  // Enqueues the call: allocates no device memory and waits for nothing. The host cannot
  // read what `call.partition` will be when the call runs: the device checks that it is
  // that of the rank's device, and fails the call for all ranks where it is not.
  void Execute(CudaCallSite& site,
               int ordinal,
               CUstream stream,
               const RankCall& call,
               const DeviceBytes& workspace);

  // Ids of the devices of this process, by ordinal; until they are set, the ordinals.
  void set_local_devices(std::map<int, int64_t> devices);
  void set_timeout_s(double timeout_s) { timeout_s_ = timeout_s; }
  // All-reduces by multicast, where a communicator has it. Before any device is used, and
  // the same in all processes.
  void set_nvls(bool nvls) { nvls_ = nvls; }

  // The communicator of the group of these devices [rank], until it leaves; then it is
  // closed. Throws CommunicatorError when the group has one already.
  void Join(std::shared_ptr<CudaCommunicator> communicator,
            std::vector<int64_t> devices);
  void Leave(const std::shared_ptr<CudaCommunicator>& communicator);

  // Forgets the communicators that were made for groups within this process: what no
  // call site holds is destroyed.
  void ReleaseInProcess();

  // Why communicators failed that still exist, by name.
  std::map<std::string, std::exception_ptr> Failures();

  CudaCounters counters();

 private:
  struct Joined {
    std::shared_ptr<CudaCommunicator> communicator;
    std::vector<int64_t> devices;
  };

  using Place = CudaCallSite::Place;
  using Preparation = CudaCallSite::Preparation;

  void InitializeWithPeers(CudaCallSite& site,
                           int ordinal,
                           const Place& place,
                           const RankCall& call);
  Place PlaceOf(const CudaCallSite& site, int ordinal);
  // What is known already, or what is known without the device.
  std::shared_ptr<const Preparation> Plan(CudaCallSite& site,
                                          int ordinal,
                                          const Place& place,
                                          const RankCall& call);
  // The rest of it.
  void Load(CudaCallSite& site,
            int ordinal,
            const Preparation& planned,
            const RankCall& call);
  std::shared_ptr<CudaCommunicator> Bind(CudaCallSite& site,
                                         const Preparation& preparation);
  // What a rank says of the call when it is ready for it.
  GpuCallSignature StatementOf(CudaCallSite& site, int rank, const RankCall& call);
  void Declare(CudaCallSite& site,
               int ordinal,
               const Place& place,
               const RankCall& call,
               const std::exception_ptr& refusal);
  std::shared_ptr<CudaCommunicator> FindJoined(const std::vector<int64_t>& devices);
  std::shared_ptr<CudaCommunicator> FindCommunicator(const CallAttributes& attributes,
                                                     int group,
                                                     const SlotRequirements& slots);
  // Of devices that all are this process's.
  std::vector<int> OrdinalsOf(const CallAttributes& attributes,
                              const std::vector<int64_t>& devices);
  void Enqueue(CudaCallSite& site,
               int ordinal,
               CUstream stream,
               const RankCall& call,
               const DeviceBytes& workspace);
  void EnqueueOnLanes(CudaCallSite& site,
                      const Preparation& preparation,
                      const CudaCallSite::Binding& binding,
                      CUstream stream,
                      const RankCall& call,
                      const DeviceBytes& workspace);
  CudaSlots SlotsOf(const Preparation& preparation,
                    const CudaCallSite::Binding& binding,
                    StreamDevice& device) const;
  std::vector<std::shared_ptr<CudaCommunicator>> Communicators();

  Gpu& GpuOf(int ordinal);
  int64_t DeviceOf(int ordinal);
  // With the lock held. OrdinalOf is -1 for a device of another process.
  Gpu& GpuOfLocked(int ordinal);
  int OrdinalOf(int64_t device) const;

  const Driver& driver_;
  const CublasLt& library_;
  std::atomic<double> timeout_s_;
  std::atomic<bool> nvls_{false};
  std::array<std::atomic<int64_t>, kNumOps> num_calls_ = {};
  std::atomic<int64_t> num_failed_{0};
  std::atomic<int64_t> num_sites_{0};  // without a channel

  std::mutex making_mutex_;  // held while a heap is made; comes before `mutex_`
  std::mutex mutex_;         // guards all below
  std::map<int, int64_t> local_devices_;
  std::map<int, std::unique_ptr<Gpu>> gpus_;
  std::vector<Joined> joined_;
  // The newest of each group, by ordinals [rank].
  std::map<std::vector<int>, std::shared_ptr<CudaCommunicator>> in_process_;
  std::vector<std::weak_ptr<CudaCommunicator>> all_;  // that still exist, and others
};

}  // namespace jax_ub
