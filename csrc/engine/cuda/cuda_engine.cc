#include "engine/cuda/cuda_engine.h"

#include <algorithm>
#include <cmath>
#include <utility>

#include "engine/cuda/multicast_reduce.h"
#include "engine/cuda/one_kernel_reduce.h"
#include "engine/executor.h"
#include "platform/error.h"

namespace jax_ub {

namespace {

bool IsAddedTo(const CallAttributes& at, size_t operand, size_t result) {
  const size_t n = at.num_kernels;
  if (at.accumulate) return result < n && operand == 1 + n + result;
  return at.has_residual && operand == FirstResidual(at) + result;
}

// Throws UnsupportedError if a result overlaps an operand, unless the call adds this
// operand to the result. XLA's dynamic slice fusion may assign the same memory to both
// without checking whether the call supports it.
void CheckNoOverlap(const CallAttributes& at, const RankCall& call) {
  for (size_t r = 0; r < call.results.size(); ++r) {
    const Tensor& result = call.results[r];
    for (size_t i = 0; i < call.operands.size(); ++i) {
      const Tensor& operand = call.operands[i];
      const bool is_disjoint = operand.data + operand.size_bytes() <= result.data ||
                               result.data + result.size_bytes() <= operand.data;
      if (is_disjoint || (operand.data == result.data && IsAddedTo(at, i, r))) continue;
      throw UnsupportedError(
          "jax_ub." + at.label + ": result " + std::to_string(r) +
          " overlaps operand " + std::to_string(i) +
          ": XLA updates a slice of an array in place with a result that is computed "
          "from it. XLA_FLAGS=--xla_gpu_enable_dynamic_slice_fusion=false gives them "
          "separate memory");
    }
  }
}

void Finish(CudaSlots& slots, const RankCall& call) {
  std::vector<NanFill::Result> results;
  for (const Tensor& tensor : call.results) {
    results.push_back({reinterpret_cast<uint64_t>(tensor.data),
                       static_cast<uint64_t>(tensor.size_bytes())});
  }
  slots.Finish(results);
}

}  // namespace

CudaCallSite::CudaCallSite(CallAttributes attributes)
    : attributes_(std::move(attributes)), flat_ranks_(FlatRankOfDevice(attributes_)) {
  CheckRunsOnCuda(attributes_);
}

CudaEngine::CudaEngine(const Driver& driver, const CublasLt& library, double timeout_s)
    : driver_(driver), library_(library), timeout_s_(timeout_s) {}

// Returns the size of the largest workspace that any rank needs. The ranks need
// different sizes, because they run the same GEMMs on different lanes (streams).
int64_t CudaEngine::WorkspaceBytes(const CallAttributes& at, const RankCall& call) {
  CheckRunsOnCuda(at);
  CheckCall(at, call);
  int64_t bytes = 0;
  for (int rank = 0; rank < at.num_ranks; ++rank) {
    bytes = std::max(bytes, PlanCall(at, call, rank).workspace.size_bytes());
  }
  return bytes;
}

void CudaEngine::Execute(CudaCallSite& site,
                         int ordinal,
                         CUstream stream,
                         const RankCall& call,
                         const DeviceBytes& workspace) {
  try {
    CheckCall(site.attributes_, call);
    CheckNoOverlap(site.attributes_, call);
    Enqueue(site, ordinal, stream, call, workspace);
  } catch (...) {
    ++num_failed_;
    throw;
  }
  ++num_calls_[static_cast<size_t>(site.attributes_.op)];
}

void CudaEngine::ExecuteTogether(CudaCallSite& site,
                                 int ordinal,
                                 CUstream stream,
                                 const RankCall& call,
                                 const DeviceBytes& workspace) {
  FirstRun* first_run = nullptr;
  std::shared_ptr<CudaCommunicator> communicator;
  {
    std::lock_guard lock(site.mutex_);
    // `preparation` is null if Initialize has failed. Execute then reports the failure.
    const auto& preparation = site.preparations_[ordinal];
    if (preparation && preparation->device_rank.has_peers) {
      const int group = preparation->device_rank.group;
      first_run = &site.first_runs_[group];
      communicator = site.bindings_[group].communicator;
    }
  }
  if (!communicator || first_run->IsOver(ordinal)) {
    return Execute(site, ordinal, stream, call, workspace);
  }
  try {
    using Stage = FirstRun::Stage;
    const CallAttributes& at = site.attributes_;
    AwaitLocalRanks(at, *first_run, ordinal, Stage::kReady, *communicator);
    Execute(site, ordinal, stream, call, workspace);
    AwaitLocalRanks(at, *first_run, ordinal, Stage::kEnqueued, *communicator);
  } catch (...) {
    first_run->Leave(ordinal);
    throw;
  }
}

void CudaEngine::AwaitLocalRanks(const CallAttributes& at,
                                 FirstRun& first_run,
                                 int ordinal,
                                 FirstRun::Stage stage,
                                 CudaCommunicator& communicator) {
  std::vector<int> ordinals;
  for (const int rank : communicator.local_ranks()) {
    ordinals.push_back(communicator.ordinal(rank));
  }
  const Deadline deadline = Deadline::After(timeout_s_);
  const std::vector<int> missing =
      first_run.Await(ordinal, stage, ordinals, deadline,
                      [&communicator] { return communicator.failure(); });
  if (missing.empty()) return;
  std::string gpus;
  for (const int other : missing) gpus.append(" ").append(std::to_string(other));
  const DeadlineError error("TimeoutError: jax_ub." + at.label + ": GPU " +
                            std::to_string(ordinal) + " waited " +
                            std::to_string(std::lround(deadline.timeout_s())) +
                            " s for the thread of GPU" + gpus +
                            " of this process, which has not begun the first run of "
                            "the call");
  communicator.Poison(std::make_exception_ptr(error));
  throw error;
}

void CudaEngine::Enqueue(CudaCallSite& site,
                         int ordinal,
                         CUstream stream,
                         const RankCall& call,
                         const DeviceBytes& workspace) {
  const CallAttributes& at = site.attributes_;
  std::shared_ptr<const Preparation> preparation;
  CudaCallSite::Binding binding;
  {
    std::lock_guard lock(site.mutex_);
    preparation = site.preparations_[ordinal];
    if (preparation && preparation->device_rank.has_peers) {
      binding = site.bindings_[preparation->device_rank.group];
    }
  }
  if (!preparation) {
    throw Error("jax_ub." + at.label + ": was not initialized on device " +
                std::to_string(ordinal));
  }
  Gpu& gpu = *preparation->gpu;
  const ScopedContext current(driver_, gpu.context());
  std::lock_guard lock(gpu.mutex());
  if (IsLocalCall(at)) {  // runs on XLA's stream
    StreamDevice device(gpu.resources(), stream, nullptr, at.kernel_options,
                        preparation->options, preparation->plan.workspace, workspace);
    return ExecuteLocal(at, call, device);
  }
  if (!binding.communicator) {
    return EnqueueOnLanes(site, *preparation, binding, stream, call, workspace);
  }
  binding.communicator->ThrowIfFailed();
  try {
    EnqueueOnLanes(site, *preparation, binding, stream, call, workspace);
  } catch (const ShapeError&) {
    throw;  // the workspace is too small, on all ranks
  } catch (...) {
    // The communicator fails, because only a part of the call is enqueued, and the
    // peers would wait for the rest.
    binding.communicator->Poison(std::current_exception());
    throw;
  }
}

// Enqueues the call on the GPU's lanes (streams). The GPU's context must be current.
// The caller must hold Gpu::mutex(), because only one call at a time may use the lanes.
void CudaEngine::EnqueueOnLanes(CudaCallSite& site,
                                const Preparation& preparation,
                                const CudaCallSite::Binding& binding,
                                CUstream stream,
                                const RankCall& call,
                                const DeviceBytes& workspace) {
  const CallAttributes& at = site.attributes_;
  Gpu& gpu = *preparation.gpu;
  const CallPlan& plan = preparation.plan;
  // Multicast is used only if the workspace is large enough. A program that was lowered
  // elsewhere may have a smaller workspace than this process has planned. The workspace
  // size is equal on all ranks, so all ranks choose the same algorithm.
  const bool by_multicast =
      binding.communicator && binding.communicator->has_multicast() &&
      preparation.by_multicast &&
      preparation.by_multicast->size_bytes() <= workspace.size_bytes;
  StreamDevice device(gpu.resources(), stream, &gpu.lanes().Find(at.kernel_options),
                      at.kernel_options, preparation.options,
                      by_multicast ? *preparation.by_multicast : plan.workspace,
                      workspace);
  try {
    if (!binding.communicator) {
      NullTransport alone(0, 1, 0);
      ExecuteRank(at, call, plan.slots, timeout_s_, alone, device, {});
      device.Gather();
    } else {
      CudaSlots slots = SlotsOf(preparation, binding, device);
      if (call.partition != nullptr) {
        slots.CheckPartition(reinterpret_cast<CUdeviceptr>(call.partition),
                             preparation.device_rank.partition);
      }
      if (by_multicast) {
        const auto sum = [&slots](const MulticastRange& range) {
          slots.SumByMulticast(range);
        };
        ReduceByMulticast(at, call, plan.slots, timeout_s_, sum, slots, device);
      } else if (ReducesInOneKernel(at, plan.slots)) {
        ReduceInOneKernel(at, call, plan.slots, timeout_s_, slots, device);
      } else {
        ExecuteRank(at, call, plan.slots, timeout_s_, slots, device, {});
      }
      device.Gather();
      Finish(slots, call);
    }
    device.Join();
  } catch (...) {
    // After an error, XLA's stream must still wait for the work that was enqueued,
    // because this work uses XLA's buffers.
    device.Gather();
    device.Join();
    throw;
  }
  if (binding.communicator && IsCapturing(driver_, stream)) {
    std::lock_guard site_lock(site.mutex_);
    site.bindings_[preparation.device_rank.group].captured = true;
  }
}

CudaSlots CudaEngine::SlotsOf(const Preparation& preparation,
                              const CudaCallSite::Binding& binding,
                              StreamDevice& device) const {
  const Gpu& gpu = *preparation.gpu;
  const SlotRequirements& slots = preparation.plan.slots;
  CudaCommunicator* const communicator = binding.communicator.get();
  const int rank = preparation.device_rank.rank;
  return {rank,
          communicator->addresses(rank),
          communicator->error(rank),
          {.number = binding.number, .tag = preparation.tag},
          communicator->AddressSlots(slots.num_slots, slots.slot_bytes),
          {.driver = &driver_,
           .flags = &gpu.flags(),
           .sums = &gpu.sums(),
           .stream = device.stream(kCommunicationLane),
           .copies = device.copies(),
           .all_reduce = &gpu.all_reduce(),
           .multicast = gpu.multicast()}};
}

Gpu& CudaEngine::GpuOf(int ordinal) {
  std::lock_guard lock(mutex_);
  return GpuOfLocked(ordinal);
}

Gpu& CudaEngine::GpuOfLocked(int ordinal) {
  const auto found = gpus_.find(ordinal);
  if (found != gpus_.end()) return *found->second;
  auto gpu = std::make_unique<Gpu>(driver_, library_, ordinal, nvls_);  // may throw
  return *gpus_.emplace(ordinal, std::move(gpu)).first->second;
}

int64_t CudaEngine::DeviceOf(int ordinal) {
  std::lock_guard lock(mutex_);
  if (local_devices_.empty()) return ordinal;
  const auto found = local_devices_.find(ordinal);
  if (found == local_devices_.end()) {
    throw CommunicatorError("CommunicatorError: GPU " + std::to_string(ordinal) +
                            " is none of this process's devices");
  }
  return found->second;
}

int CudaEngine::OrdinalOf(int64_t device) const {
  if (local_devices_.empty()) return static_cast<int>(device);
  for (const auto& [ordinal, id] : local_devices_) {
    if (id == device) return ordinal;
  }
  return -1;
}

void CudaEngine::set_local_devices(std::map<int, int64_t> devices) {
  std::lock_guard lock(mutex_);
  local_devices_ = std::move(devices);
}

void CudaEngine::Join(std::shared_ptr<CudaCommunicator> communicator,
                      std::vector<int64_t> devices) {
  std::lock_guard lock(mutex_);
  for (const Joined& joined : joined_) {
    if (joined.devices != devices) continue;
    throw CommunicatorError("CommunicatorError: communicator " + communicator->name() +
                            ": its devices are those of " +
                            joined.communicator->name());
  }
  try {
    for (const int rank : communicator->local_ranks()) {
      GpuOfLocked(communicator->ordinal(rank));
    }
  } catch (...) {
    // The communicator fails, so that Close does not wait for the connected peers until
    // its timeout.
    communicator->Poison(std::current_exception());
    throw;
  }
  all_.push_back(communicator);
  joined_.push_back({std::move(communicator), std::move(devices)});
}

void CudaEngine::Leave(const std::shared_ptr<CudaCommunicator>& communicator) {
  // A forked child must not take the locks below. If a thread of the parent held a lock
  // during the fork, the lock is never released in the child.
  if (communicator->IsForkedChild()) return;
  communicator->RejectCalls();
  std::vector<Gpu*> gpus;
  {
    std::lock_guard lock(mutex_);
    std::erase_if(joined_, [&](const Joined& joined) {
      return joined.communicator == communicator;
    });
    for (const auto& [ordinal, gpu] : gpus_) gpus.push_back(gpu.get());
  }
  // Locks and unlocks the mutex of each GPU, to wait for calls that are being enqueued.
  // The mutexes are not held while Close waits for the peers, so other calls may
  // continue.
  for (Gpu* const gpu : gpus) std::lock_guard(gpu->mutex());
  communicator->Close();
}

void CudaEngine::ReleaseInProcess() {
  // Declared before `lock`, so that the communicators are destroyed after the lock is
  // released, because their destruction waits for devices.
  std::map<std::vector<int>, std::shared_ptr<CudaCommunicator>> released;
  std::lock_guard lock(mutex_);
  released.swap(in_process_);
}

std::vector<std::shared_ptr<CudaCommunicator>> CudaEngine::Communicators() {
  std::vector<std::shared_ptr<CudaCommunicator>> communicators;
  std::lock_guard lock(mutex_);
  std::erase_if(all_, [&](const auto& weak) {
    communicators.push_back(weak.lock());
    if (communicators.back()) return false;
    communicators.pop_back();
    return true;
  });
  return communicators;
}

std::map<std::string, std::exception_ptr> CudaEngine::Failures() {
  std::map<std::string, std::exception_ptr> failures;
  for (const auto& communicator : Communicators()) {
    const std::exception_ptr failure = communicator->failure();
    if (failure) failures.emplace(communicator->name(), failure);
  }
  return failures;
}

CudaCounters CudaEngine::counters() {
  CudaCounters counters;
  for (int op = 0; op < kNumOps; ++op) counters.calls[op] = num_calls_[op].load();
  counters.failed_calls = num_failed_.load();
  for (const auto& communicator : Communicators()) {
    counters.heap_bytes += communicator->size_bytes();
  }
  return counters;
}

}  // namespace jax_ub
