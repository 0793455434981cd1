// The CUDA engine. XLA calls it on the launch thread of each device, in the same order
// on every rank, so the host does not match the ranks' calls. If several host threads
// launch programs in different orders, the waits of the calls fail (cuda_slots.h).
// Initialize runs before every run of a program. Execute enqueues a call, or is
// captured once into a graph that is then replayed without Execute.
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
#include "engine/cuda/first_run.h"
#include "engine/cuda/gpu.h"
#include "gemm/cuda/cublaslt.h"
#include "platform/cuda/driver.h"
#include "transport/cuda/communicator.h"

namespace jax_ub {

// One custom call of one compiled program, on all devices of this process.
class CudaCallSite {
 public:
  // Throws std::invalid_argument if the attributes are invalid for every op, and
  // UnsupportedError if GPUs do not support them.
  explicit CudaCallSite(CallAttributes attributes);

  const CallAttributes& attributes() const { return attributes_; }

 private:
  friend class CudaEngine;

  struct DeviceRank {
    int group = 0;
    int rank = 0;
    bool has_peers = false;
    uint32_t partition = 0;  // only if CallAttributes::devices is set
  };
  // What Initialize prepares for a call on one device: plans, options and memory.
  struct Preparation {
    DeviceRank device_rank;
    // The alignments of the operands and results for which the GEMMs were planned.
    std::vector<int> alignments;
    uint32_t tag = 0;  // GpuCallSignature::tag, if it has peers
    CallPlan plan;
    // The plan of a multicast reduction, if the call can be reduced by multicast.
    std::optional<WorkspacePlan> by_multicast;
    GemmOptions options;
    Gpu* gpu = nullptr;
  };
  // The communicator of a group. Captured graphs contain its addresses, so it may be
  // replaced only while nothing has been captured.
  struct Binding {
    std::shared_ptr<CudaCommunicator> communicator;
    uint32_t number = 0;  // the communicator's number of the call site
    bool captured = false;
    // The error of the last attempt to bind a communicator, and the ranks to which it
    // has been thrown.
    std::exception_ptr rejection;
    std::set<int> notified_ranks;
  };

  const CallAttributes attributes_;
  // Maps device ids to group * P + rank, as returned by FlatRankOfDevice.
  const std::unordered_map<int64_t, size_t> flat_ranks_;
  std::mutex mutex_;  // guards the members below
  std::map<int, std::shared_ptr<const Preparation>> preparations_;  // by device ordinal
  std::map<int, Binding> bindings_;                                 // by group
  std::map<int, FirstRun> first_runs_;                              // by group
  // Keyed by device ordinal: the communicator that has received this rank's signature.
  std::map<int, std::weak_ptr<CudaCommunicator>> declared_;
  std::string name_;  // the same in every process that runs the call site
};

struct CudaCounters {
  std::array<int64_t, kNumOps> calls = {};  // enqueued or captured
  int64_t failed_calls = 0;                 // calls that were rejected on the host
  int64_t heap_bytes = 0;                   // of all communicators that exist
};

class CudaEngine {
 public:
  // `driver` and `library` must outlive the engine. Does not access any device.
  CudaEngine(const Driver& driver, const CublasLt& library, double timeout_s);

  // Returns the workspace size of a call: the maximum over all ranks. Python calls it
  // when it lowers a call, with tensors that have no data. Needs no device.
  static int64_t WorkspaceBytes(const CallAttributes& attributes, const RankCall& call);

  // Finds or creates the communicator, plans the GEMMs and loads the kernels. Cheap if
  // nothing has changed. Rethrows the error of an earlier call of the communicator. On
  // first use it declares this rank's signature of the call to the peers, or the reason
  // why this rank rejects the call; the communicator fails if the signatures differ.
  // Does not wait for peers.
  void Initialize(CudaCallSite& site, int ordinal, const RankCall& call);
  // Enqueues the call. Allocates no device memory and does not wait. The host cannot
  // read the value that `call.partition` will have when the call runs, so the device
  // checks that it is the partition id of the rank's device. If it is not, the call
  // fails on all ranks.
  void Execute(CudaCallSite& site,
               int ordinal,
               CUstream stream,
               const RankCall& call,
               const DeviceBytes& workspace);

  // Enqueues the call as Execute does, in a process with several devices. Requires that
  // each device has a thread, as in XLA: in the first run of the call site, the threads
  // of a group's devices wait for each other (first_run.h). Throws DeadlineError, and
  // fails the communicator, if a device does not take part.
  void ExecuteTogether(CudaCallSite& site,
                       int ordinal,
                       CUstream stream,
                       const RankCall& call,
                       const DeviceBytes& workspace);

  // Sets the ids of this process's devices, by ordinal. Until then, ids equal ordinals.
  void set_local_devices(std::map<int, int64_t> devices);
  void set_timeout_s(double timeout_s) { timeout_s_ = timeout_s; }
  // Enables all-reduces by multicast where a communicator supports it. Must be called
  // before any device is used, with the same value in all processes.
  void set_nvls(bool nvls) { nvls_ = nvls; }

  // Registers the communicator of the group of these devices [rank], until Leave closes
  // it. Throws CommunicatorError if the group already has one.
  void Join(std::shared_ptr<CudaCommunicator> communicator,
            std::vector<int64_t> devices);
  void Leave(const std::shared_ptr<CudaCommunicator>& communicator);

  // Drops the communicators that were created for groups within this process. Those
  // that no call site holds are destroyed.
  void ReleaseInProcess();

  // Returns the failures of existing communicators, by communicator name.
  std::map<std::string, std::exception_ptr> Failures();

  CudaCounters counters();

 private:
  struct Joined {
    std::shared_ptr<CudaCommunicator> communicator;
    std::vector<int64_t> devices;
  };

  using DeviceRank = CudaCallSite::DeviceRank;
  using Preparation = CudaCallSite::Preparation;

  void InitializeWithPeers(CudaCallSite& site,
                           int ordinal,
                           const DeviceRank& device_rank,
                           const RankCall& call);
  DeviceRank DeviceRankOf(const CudaCallSite& site, int ordinal);
  // Returns the call's Preparation for the device if it is still valid. Otherwise
  // returns a new one without the members that Load sets; its `gpu` is null.
  std::shared_ptr<const Preparation> Plan(CudaCallSite& site,
                                          int ordinal,
                                          const DeviceRank& device_rank,
                                          const RankCall& call);
  // Stores a copy of `planned`, the result of Plan, with the members that need the
  // device: plans the GEMMs with cuBLASLt and sets `options`, `by_multicast` and `gpu`.
  // Does nothing if `gpu` is set already.
  void Load(CudaCallSite& site,
            int ordinal,
            const Preparation& planned,
            const RankCall& call);
  std::shared_ptr<CudaCommunicator> Bind(CudaCallSite& site,
                                         const Preparation& preparation);
  // Returns the rank's signature of the call, which Declare sends to the peers so that
  // all ranks can detect different calls.
  GpuCallSignature SignatureOf(CudaCallSite& site, int rank, const RankCall& call);
  void Declare(CudaCallSite& site,
               int ordinal,
               const DeviceRank& device_rank,
               const RankCall& call,
               const std::exception_ptr& rejection);
  // Waits until all devices of the group in this process have reached `stage`.
  void AwaitLocalRanks(const CallAttributes& attributes,
                       FirstRun& first_run,
                       int ordinal,
                       FirstRun::Stage stage,
                       CudaCommunicator& communicator);
  std::shared_ptr<CudaCommunicator> FindJoined(const std::vector<int64_t>& devices);
  std::shared_ptr<CudaCommunicator> FindCommunicator(const CallAttributes& attributes,
                                                     int group,
                                                     const SlotRequirements& slots);
  // Returns the ordinals of `devices`, which must all belong to this process.
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
  // Look up a GPU by ordinal, and the ordinal of a device id; both require `mutex_`.
  // OrdinalOf returns -1 for a device of another process.
  Gpu& GpuOfLocked(int ordinal);
  int OrdinalOf(int64_t device) const;

  const Driver& driver_;
  const CublasLt& library_;
  std::atomic<double> timeout_s_;
  std::atomic<bool> nvls_{false};
  std::array<std::atomic<int64_t>, kNumOps> num_calls_ = {};
  std::atomic<int64_t> num_failed_{0};
  std::atomic<int64_t> num_sites_{0};  // call sites without a channel

  std::mutex making_mutex_;  // held while a heap is created; locked before `mutex_`
  std::mutex mutex_;         // guards the members below
  std::map<int, int64_t> local_devices_;
  std::map<int, std::unique_ptr<Gpu>> gpus_;
  std::vector<Joined> joined_;
  // The newest communicator of each group within this process, by ordinals [rank].
  std::map<std::vector<int>, std::shared_ptr<CudaCommunicator>> in_process_;
  std::vector<std::weak_ptr<CudaCommunicator>> all_;  // may contain expired pointers
};

}  // namespace jax_ub
