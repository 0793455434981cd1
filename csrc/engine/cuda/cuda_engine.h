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

// One custom call of a compiled program, on all devices of this process.
class CudaCallSite {
 public:
  // Throws std::invalid_argument if no op accepts the attributes, and UnsupportedError
  // if GPUs do not support them.
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
    // The alignments in bytes, of all operands and then all results, for which the
    // GEMMs were planned.
    std::vector<int> alignments;
    uint32_t tag = 0;  // GpuCallSignature::tag, if it has peers
    CallPlan plan;
    // Layout of the workspace if the call is reduced by NVLink multicast. Empty if
    // multicast cannot reduce it.
    std::optional<WorkspacePlan> by_multicast;
    GemmOptions options;
    Gpu* gpu = nullptr;
  };
  // The communicator of a group. A captured graph contains addresses of the
  // communicator, which is therefore not replaced after a capture.
  struct Binding {
    std::shared_ptr<CudaCommunicator> communicator;
    uint32_t number = 0;  // the communicator's number of the call site
    bool captured = false;
    // The error of the last attempt to bind a communicator, and the ranks that have
    // reported it.
    std::exception_ptr rejection;
    std::set<int> notified_ranks;
  };

  const CallAttributes attributes_;
  // Maps a device id to group * num_ranks + rank within the group.
  const std::unordered_map<int64_t, size_t> flat_ranks_;
  std::mutex mutex_;  // guards the members below
  std::map<int, std::shared_ptr<const Preparation>> preparations_;  // by device ordinal
  std::map<int, Binding> bindings_;                                 // by group
  std::map<int, FirstRun> first_runs_;                              // by group
  // Keyed by device ordinal: the communicator through which the device's rank has sent
  // the signature of the call to its peers.
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

  // Returns the size of a call's workspace, the maximum over all ranks. Python calls
  // this when it lowers a call, with tensors that have no data. Needs no device.
  static int64_t WorkspaceBytes(const CallAttributes& attributes, const RankCall& call);

  // Finds or creates the communicator, plans the GEMMs and loads the kernels. Cheap if
  // nothing has changed. Does not wait for peers. Rethrows the error of a failed
  // communicator.
  // On first use, sends this rank's signature of the call to the peers, or the reason
  // why this rank rejects the call. If the signatures of the ranks differ, the
  // communicator fails.
  void Initialize(CudaCallSite& site, int ordinal, const RankCall& call);
  // Enqueues the call. Allocates no device memory and does not wait. `call.partition`
  // is in device memory, so a kernel checks that it has the expected value. If it does
  // not, the call fails on all ranks.
  void Execute(CudaCallSite& site,
               int ordinal,
               CUstream stream,
               const RankCall& call,
               const DeviceBytes& workspace);

  // Enqueues the call as Execute does, in a process with several devices, each of which
  // must have its own thread, as in XLA. In the first run of the call site, the threads
  // of a group's devices wait for each other (first_run.h). If a device does not take
  // part, fails the communicator and throws DeadlineError.
  void ExecuteTogether(CudaCallSite& site,
                       int ordinal,
                       CUstream stream,
                       const RankCall& call,
                       const DeviceBytes& workspace);

  // Sets the map from CUDA ordinals to XLA's ids of this process's devices. By default,
  // ids equal ordinals.
  void set_local_devices(std::map<int, int64_t> devices);
  void set_timeout_s(double timeout_s) { timeout_s_ = timeout_s; }
  // Enables all-reduces by NVLink multicast (NVLS) for communicators that support it.
  // Must be called with the same value in all processes, before a device is used.
  void set_nvls(bool nvls) { nvls_ = nvls; }

  // Makes calls of the group of `devices` (indexed by rank) use the communicator until
  // Leave. Throws CommunicatorError if the group already has one. If a device cannot be
  // used, fails the communicator and throws SystemError.
  void Join(std::shared_ptr<CudaCommunicator> communicator,
            std::vector<int64_t> devices);
  void Leave(const std::shared_ptr<CudaCommunicator>& communicator);

  // Releases the communicators of groups within this process. Call sites may still hold
  // some of them; the others are destroyed.
  void ReleaseInProcess();

  // Returns the error of each failed communicator, by name.
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
  // Returns the device's Preparation for the call if it is still valid. Otherwise
  // returns a new Preparation, without the members that Load sets (`gpu` is null).
  std::shared_ptr<const Preparation> Plan(CudaCallSite& site,
                                          int ordinal,
                                          const DeviceRank& device_rank,
                                          const RankCall& call);
  // Does the part of the preparation that requires the device: plans the GEMMs with
  // cuBLASLt, and stores a copy of `planned` (from Plan), with `options`,
  // `by_multicast` and `gpu` set, in site.preparations_. Does nothing if `planned.gpu`
  // is already set.
  void Load(CudaCallSite& site,
            int ordinal,
            const Preparation& planned,
            const RankCall& call);
  std::shared_ptr<CudaCommunicator> Bind(CudaCallSite& site,
                                         const Preparation& preparation);
  // Returns the rank's signature of the call (op, shapes, dtypes, options). Declare
  // sends it to the peers, so that each rank can detect that another one makes a
  // different call.
  GpuCallSignature SignatureOf(CudaCallSite& site, int rank, const RankCall& call);
  void Declare(CudaCallSite& site,
               int ordinal,
               const DeviceRank& device_rank,
               const RankCall& call,
               const std::exception_ptr& rejection);
  // Waits until all devices of the group in this process have reached `stage` of their
  // first run. At the deadline, fails the communicator and throws DeadlineError.
  void AwaitLocalRanks(const CallAttributes& attributes,
                       FirstRun& first_run,
                       int ordinal,
                       FirstRun::Stage stage,
                       CudaCommunicator& communicator);
  std::shared_ptr<CudaCommunicator> FindJoined(const std::vector<int64_t>& devices);
  std::shared_ptr<CudaCommunicator> FindCommunicator(const CallAttributes& attributes,
                                                     int group,
                                                     const SlotRequirements& slots);
  // Returns the ordinals of `devices`. Throws unless all of them belong to this
  // process.
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
  // GpuOfLocked returns the GPU with an ordinal. OrdinalOf returns the ordinal of a
  // device id, or -1 if the device belongs to another process. Both require `mutex_`.
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
  // The latest communicator of each group within this process, by ordinals [rank].
  std::map<std::vector<int>, std::shared_ptr<CudaCommunicator>> in_process_;
  std::vector<std::weak_ptr<CudaCommunicator>> all_;  // may contain expired pointers
};

}  // namespace jax_ub
