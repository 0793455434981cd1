// The CUDA engine. XLA calls it on the launch thread of each device, in the same order
// on every rank, so the host need not match the calls of the ranks. If several host
// threads launch programs in different orders, the waits of the calls fail
// (cuda_slots.h). XLA calls Initialize before every run of a program. It calls Execute
// to enqueue a call, or to capture it once into a graph, which it then replays without
// Execute.
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

// One custom call of a compiled program, on all devices of this process.
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
  // What Initialize prepares for a call on one device: the plans of its GEMMs and
  // memory, and its options.
  struct Preparation {
    DeviceRank device_rank;
    // The alignments in bytes for which the GEMMs were planned: those of all operands,
    // followed by those of all results.
    std::vector<int> alignments;
    uint32_t tag = 0;  // GpuCallSignature::tag, if it has peers
    CallPlan plan;
    // Layout of the workspace if NVLink multicast reduces the call. Empty if multicast
    // cannot reduce it.
    std::optional<WorkspacePlan> by_multicast;
    GemmOptions options;
    Gpu* gpu = nullptr;
  };
  // The communicator of a group. It is not replaced after a graph capture, because the
  // captured graph contains its addresses.
  struct Binding {
    std::shared_ptr<CudaCommunicator> communicator;
    uint32_t number = 0;  // the communicator's number of the call site
    bool captured = false;
    // The error of the last attempt to find a communicator, and the ranks that have
    // reported this error.
    std::exception_ptr rejection;
    std::set<int> notified_ranks;
  };

  const CallAttributes attributes_;
  // Maps a device id to group * num_ranks + rank.
  const std::unordered_map<int64_t, size_t> flat_ranks_;
  std::mutex mutex_;  // guards the members below
  std::map<int, std::shared_ptr<const Preparation>> preparations_;  // by device ordinal
  std::map<int, Binding> bindings_;                                 // by group
  std::map<int, FirstRun> first_runs_;                              // by group
  // The communicator through which a device's rank has sent the signature of the call
  // to its peers, keyed by device ordinal.
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
  // `driver` and `library` must outlive the engine. The constructor accesses no device.
  CudaEngine(const Driver& driver, const CublasLt& library, double timeout_s);

  // Returns the maximum size over all ranks of a call's workspace. Python calls this
  // function when it lowers a call. The tensors of `call` need no data, and no device
  // is needed.
  static int64_t WorkspaceBytes(const CallAttributes& attributes, const RankCall& call);

  // Finds or creates the communicator, plans the GEMMs and loads the kernels. Takes
  // little time if nothing has changed. Does not wait for peers. Rethrows the error of
  // a failed communicator. On first use, sends this rank's signature of the call to the
  // peers, or the reason why this rank rejects the call. If the signatures of the ranks
  // differ, the communicator fails.
  void Initialize(CudaCallSite& site, int ordinal, const RankCall& call);
  // Enqueues the call. Allocates no device memory and does not wait. A kernel compares
  // `call.partition`, which is in device memory, with the expected partition id. If
  // they differ, the call fails on all ranks.
  void Execute(CudaCallSite& site,
               int ordinal,
               CUstream stream,
               const RankCall& call,
               const DeviceBytes& workspace);

  // Enqueues the call as Execute does. Used in a process with several devices, each of
  // which must have its own thread, as in XLA. In the first run of the call site, the
  // threads of a group's devices wait for each other (first_run.h). If the thread of a
  // device does not arrive in time, fails the communicator and throws DeadlineError.
  void ExecuteTogether(CudaCallSite& site,
                       int ordinal,
                       CUstream stream,
                       const RankCall& call,
                       const DeviceBytes& workspace);

  // Sets the XLA device ids of this process's devices, keyed by CUDA ordinal. By
  // default, the ids equal the ordinals.
  void set_local_devices(std::map<int, int64_t> devices);
  void set_timeout_s(double timeout_s) { timeout_s_ = timeout_s; }
  // Enables all-reduces by NVLink multicast (NVLS) for communicators that support it.
  // Must be called with the same value in all processes, before a device is used.
  void set_nvls(bool nvls) { nvls_ = nvls; }

  // Makes calls of the group of `devices` (indexed by rank) use the communicator until
  // Leave. Throws CommunicatorError if the group already has a communicator. If a
  // device cannot be used, fails the communicator and throws SystemError.
  void Join(std::shared_ptr<CudaCommunicator> communicator,
            std::vector<int64_t> devices);
  void Leave(const std::shared_ptr<CudaCommunicator>& communicator);

  // Releases the communicators of groups within this process. A communicator is
  // destroyed unless a call site still holds it.
  void ReleaseInProcess();

  // Returns the error of each failed communicator, keyed by the name of the
  // communicator.
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
  // Returns the device's Preparation for the call if it is still valid. Otherwise,
  // returns a new Preparation without the members that Load sets (`gpu` is null).
  std::shared_ptr<const Preparation> Plan(CudaCallSite& site,
                                          int ordinal,
                                          const DeviceRank& device_rank,
                                          const RankCall& call);
  // Does the part of the preparation that requires the device: plans the GEMMs with
  // cuBLASLt. Stores a copy of `planned` (from Plan) with `options`, `by_multicast` and
  // `gpu` in site.preparations_. Does nothing if `planned.gpu` is already set.
  void Load(CudaCallSite& site,
            int ordinal,
            const Preparation& planned,
            const RankCall& call);
  std::shared_ptr<CudaCommunicator> Bind(CudaCallSite& site,
                                         const Preparation& preparation);
  // Returns the rank's signature of the call (op, shapes, dtypes, options). The ranks
  // exchange their signatures to detect calls that differ between them.
  GpuCallSignature SignatureOf(CudaCallSite& site, int rank, const RankCall& call);
  void Declare(CudaCallSite& site,
               int ordinal,
               const DeviceRank& device_rank,
               const RankCall& call,
               const std::exception_ptr& rejection);
  // Waits until all devices of the group in this process have reached `stage` of their
  // first run (first_run.h). At the deadline, fails the communicator and throws
  // DeadlineError.
  void AwaitLocalRanks(const CallAttributes& attributes,
                       FirstRun& first_run,
                       int ordinal,
                       FirstRun::Stage stage,
                       CudaCommunicator& communicator);
  std::shared_ptr<CudaCommunicator> FindJoined(const std::vector<int64_t>& devices);
  std::shared_ptr<CudaCommunicator> FindCommunicator(const CallAttributes& attributes,
                                                     int group,
                                                     const SlotRequirements& slots);
  // Returns the CUDA ordinals of `devices`. Throws CommunicatorError unless all of them
  // belong to this process.
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
  // Returns the GPU with a CUDA ordinal. Requires `mutex_`.
  Gpu& GpuOfLocked(int ordinal);
  // Returns the CUDA ordinal of a device id, or -1 if the device belongs to another
  // process. Requires `mutex_`.
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
  // The newest communicator of each group within this process. The key contains the
  // CUDA ordinals of the group, indexed by rank.
  std::map<std::vector<int>, std::shared_ptr<CudaCommunicator>> in_process_;
  std::vector<std::weak_ptr<CudaCommunicator>> all_;  // may contain expired pointers
};

}  // namespace jax_ub
