#include "engine/cuda/cuda_engine.h"

#include <algorithm>
#include <bit>
#include <span>
#include <utility>

#include "engine/executor.h"
#include "platform/error.h"

namespace jax_ub {

namespace {

// Heaps of groups within this process are made in steps, so that calls of nearly one size
// share them.
constexpr int64_t kHeapStepBytes = int64_t{8} << 20;

// What products may depend on of an address: XLA aligns to no more.
constexpr int kMaxAlignment = 256;

int AlignmentOf(const Tensor& tensor) {
  const auto address = reinterpret_cast<uintptr_t>(tensor.data);
  return static_cast<int>(std::min<uintptr_t>(address & -address, kMaxAlignment));
}

std::vector<int> AlignmentsOf(const RankCall& call) {
  std::vector<int> alignments;
  for (const Tensor& tensor : call.operands) alignments.push_back(AlignmentOf(tensor));
  for (const Tensor& tensor : call.results) alignments.push_back(AlignmentOf(tensor));
  return alignments;
}

GemmOptions OptionsOf(const Attributes& at, const Gpu& gpu) {
  GemmOptions options;
  const int margin = IsLocalCall(at) ? 0 : at.tuning.sm_margin;
  if (margin > 0) options.sm_target = std::max(gpu.num_sms() - margin, 1);
  options.allow_tf32 = at.tuning.allow_tf32;
  options.algorithm = at.tuning.gemm_algorithm;
  return options;
}

bool IsCapturing(const Driver& driver, CUstream stream) {
  CUstreamCaptureStatus status = CU_STREAM_CAPTURE_STATUS_NONE;
  Check(driver, driver.StreamIsCapturing(stream, &status), "cuStreamIsCapturing");
  return status != CU_STREAM_CAPTURE_STATUS_NONE;
}

void SpoilResults(CudaSlots& slots, const RankCall& call) {
  std::vector<SpoilParams::Result> results;
  for (const Tensor& tensor : call.results) {
    results.push_back({reinterpret_cast<uint64_t>(tensor.data),
                       static_cast<uint64_t>(tensor.size_bytes())});
  }
  for (size_t begin = 0; begin < results.size(); begin += kMaxResults) {
    const size_t count = std::min<size_t>(results.size() - begin, kMaxResults);
    slots.Spoil(std::span(results).subspan(begin, count));
  }
}

}  // namespace

CudaCallSite::CudaCallSite(Attributes attributes)
    : attributes_(std::move(attributes)), places_(PlacesOf(attributes_)) {
  CheckRunsOnCuda(attributes_);
}

CudaEngine::CudaEngine(const Driver& driver, const CublasLt& library, double timeout_s)
    : driver_(driver), library_(library), timeout_s_(timeout_s) {}

// Ranks multiply the same pieces on other lanes, so that their needs may differ.
int64_t CudaEngine::WorkspaceBytes(const Attributes& at, const RankCall& call) {
  CheckRunsOnCuda(at);
  CheckCall(at, call);
  int64_t bytes = 0;
  for (int rank = 0; rank < at.num_ranks; ++rank) {
    bytes = std::max(bytes, PlanCall(at, call, rank).workspace.size_bytes());
  }
  return bytes;
}

void CudaEngine::Initialize(CudaCallSite& site, int ordinal, const RankCall& call) {
  try {
    CheckCall(site.attributes_, call);
    const auto preparation = Prepare(site, ordinal, call);
    if (preparation->uses_communicator) Bind(site, *preparation);
  } catch (...) {
    ++num_failed_;
    throw;
  }
}

std::shared_ptr<const CudaCallSite::Preparation> CudaEngine::Prepare(
    CudaCallSite& site, int ordinal, const RankCall& call) {
  const Attributes& at = site.attributes_;
  std::vector<int> alignments = AlignmentsOf(call);
  {
    std::lock_guard lock(site.mutex_);
    const auto& known = site.preparations_[ordinal];
    if (known && known->alignments == alignments) return known;
  }
  auto preparation = std::make_shared<CudaCallSite::Preparation>();
  preparation->gpu = &GpuOf(ordinal);
  preparation->alignments = std::move(alignments);
  if (!IsLocalCall(at)) {
    const auto place = site.places_.find(DeviceOf(ordinal));
    if (place == site.places_.end()) {
      throw CommunicatorError("CommunicatorError: jax_ub." + at.label + ": device " +
                              std::to_string(DeviceOf(ordinal)) +
                              " is not among the devices of the mesh axis");
    }
    preparation->group = static_cast<int>(place->second / at.num_ranks);
    preparation->rank = static_cast<int>(place->second % at.num_ranks);
    preparation->uses_communicator = at.num_ranks > 1;
  }
  Gpu& gpu = *preparation->gpu;
  const ScopedContext current(driver_, gpu.context());
  preparation->options = OptionsOf(at, gpu);
  // The scratch that products will have is aligned as this is; its size is that of the
  // largest product of the lane.
  preparation->plan =
      PlanCall(at, call, preparation->rank, [&](Lane, const GemmProblem& problem) {
        gpu.gemm().Prepare(problem, preparation->options,
                           {kMaxAlignment, CudaGemm::WorkspaceBytes(problem)});
      });
  if (!IsLocalCall(at)) {
    std::lock_guard lock(gpu.mutex());
    StreamLanes& lanes = gpu.lanes().Find(at.tuning);
    lanes.ReserveEvents(StreamDevice::NumEvents(preparation->plan.workspace, lanes));
  }
  std::lock_guard lock(site.mutex_);
  site.preparations_[ordinal] = preparation;
  return preparation;
}

// A communicator that failed is replaced only where no graph refers to it, and only by
// one that was made since.
void CudaEngine::Bind(CudaCallSite& site,
                      const CudaCallSite::Preparation& preparation) {
  std::lock_guard lock(site.mutex_);
  CudaCallSite::Binding& binding = site.bindings_[preparation.group];
  if (binding.communicator) {
    if (binding.captured || !binding.communicator->failure()) {
      return binding.communicator->ThrowIfFailed();
    }
  }
  const SlotPlan& slots = preparation.plan.slots;
  auto communicator = FindCommunicator(site.attributes_, preparation.group, slots);
  communicator->ThrowIfFailed();
  communicator->Place(slots.num_slots,
                      slots.slot_bytes);  // or says that it is too small
  binding.number = communicator->NumberOf(site.attributes_.label);
  binding.communicator = std::move(communicator);
}

std::shared_ptr<CudaCommunicator> CudaEngine::FindCommunicator(const Attributes& at,
                                                               int group,
                                                               const SlotPlan& slots) {
  const auto first = at.ranks.begin() + group * at.num_ranks;
  const std::vector<int64_t> devices(first, first + at.num_ranks);
  std::lock_guard lock(mutex_);
  for (const Joined& joined : joined_) {
    if (joined.devices == devices) return joined.communicator;
  }
  std::vector<int> ordinals;
  for (const int64_t device : devices) {
    const int ordinal = OrdinalOf(device);
    if (ordinal < 0) {
      throw CommunicatorError(
          "CommunicatorError: jax_ub." + at.label + ": device " +
          std::to_string(device) +
          " is another process's, and no communicator connects it: call "
          "ub.initialize_ub in all processes first");
    }
    ordinals.push_back(ordinal);
  }
  const int64_t need_bytes = slots.num_slots * CudaSlots::StrideOf(slots.slot_bytes);
  std::shared_ptr<CudaCommunicator>& newest = in_process_[ordinals];
  if (newest && newest->slots_bytes() >= need_bytes) return newest;
  // Kernels are loaded before any device can wait for another.
  for (const int ordinal : ordinals) GpuOfLocked(ordinal);
  newest = CudaCommunicator::Make(
      driver_, ordinals,
      (need_bytes + kHeapStepBytes - 1) / kHeapStepBytes * kHeapStepBytes);
  all_.push_back(newest);
  return newest;
}

void CudaEngine::Execute(CudaCallSite& site,
                         int ordinal,
                         CUstream stream,
                         const RankCall& call,
                         const DeviceBytes& workspace) {
  try {
    CheckCall(site.attributes_, call);
    Enqueue(site, ordinal, stream, call, workspace);
  } catch (...) {
    ++num_failed_;
    throw;
  }
  ++num_calls_[static_cast<size_t>(site.attributes_.op)];
}

void CudaEngine::Enqueue(CudaCallSite& site,
                         int ordinal,
                         CUstream stream,
                         const RankCall& call,
                         const DeviceBytes& workspace) {
  const Attributes& at = site.attributes_;
  std::shared_ptr<const CudaCallSite::Preparation> preparation;
  CudaCallSite::Binding binding;
  {
    std::lock_guard lock(site.mutex_);
    preparation = site.preparations_[ordinal];
    if (preparation && preparation->uses_communicator) {
      binding = site.bindings_[preparation->group];
    }
  }
  if (!preparation) {
    throw Error("jax_ub." + at.label + ": was not initialized on device " +
                std::to_string(ordinal));
  }
  Gpu& gpu = *preparation->gpu;
  const CallPlan& plan = preparation->plan;
  const ScopedContext current(driver_, gpu.context());
  std::lock_guard lock(gpu.mutex());
  if (IsLocalCall(at)) {
    StreamDevice device(gpu.kit(), stream, at.tuning, preparation->options,
                        plan.workspace, workspace);
    return ExecuteLocal(at, call, device);
  }
  if (binding.communicator) binding.communicator->ThrowIfFailed();
  StreamDevice device(gpu.kit(), stream, gpu.lanes().Find(at.tuning), at.tuning,
                      preparation->options, plan.workspace, workspace);
  try {
    if (!binding.communicator) {
      LoneTransport alone(0, 1, 0);
      ExecuteRank(at, call, plan.slots, timeout_s_, alone, device, {});
      device.Gather();
    } else {
      CudaSlots slots = SlotsOf(*preparation, binding, device);
      ExecuteRank(at, call, plan.slots, timeout_s_, slots, device, {});
      device.Gather();
      SpoilResults(slots, call);
    }
  } catch (...) {
    // Half of a call: the peers would wait for the rest.
    if (binding.communicator) {
      binding.communicator->Poison(std::current_exception());
    }
    device.Gather();
    device.Join();
    throw;
  }
  device.Join();
  if (binding.communicator && IsCapturing(driver_, stream)) {
    std::lock_guard site_lock(site.mutex_);
    site.bindings_[preparation->group].captured = true;
  }
}

CudaSlots CudaEngine::SlotsOf(const CudaCallSite::Preparation& preparation,
                              const CudaCallSite::Binding& binding,
                              StreamDevice& device) const {
  const Gpu& gpu = *preparation.gpu;
  const SlotPlan& slots = preparation.plan.slots;
  CudaCommunicator* const communicator = binding.communicator.get();
  return {preparation.rank,
          communicator->places(preparation.rank),
          communicator->error(preparation.rank),
          binding.number,
          communicator->Place(slots.num_slots, slots.slot_bytes),
          {.driver = &driver_,
           .flags = &gpu.flags(),
           .sums = &gpu.sums(),
           .stream = device.stream(kCommunicationLane),
           .copies = device.copies()},
          [communicator](const std::exception_ptr& reason) {
            communicator->Poison(reason);
          }};
}

Gpu& CudaEngine::GpuOf(int ordinal) {
  std::lock_guard lock(mutex_);
  return GpuOfLocked(ordinal);
}

Gpu& CudaEngine::GpuOfLocked(int ordinal) {
  std::unique_ptr<Gpu>& gpu = gpus_[ordinal];
  if (!gpu) gpu = std::make_unique<Gpu>(driver_, library_, ordinal);
  return *gpu;
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
  for (const int rank : communicator->local_ranks()) {
    GpuOfLocked(communicator->ordinal(rank));
  }
  all_.push_back(communicator);
  joined_.push_back({std::move(communicator), std::move(devices)});
}

void CudaEngine::Leave(const std::shared_ptr<CudaCommunicator>& communicator) {
  std::vector<std::unique_lock<std::mutex>> enqueueing;
  {
    std::lock_guard lock(mutex_);
    std::erase_if(joined_, [&](const Joined& joined) {
      return joined.communicator == communicator;
    });
    // In the order of the ordinals, as everybody who takes several would.
    for (const auto& [ordinal, gpu] : gpus_) enqueueing.emplace_back(gpu->mutex());
  }
  communicator->Close();
}

void CudaEngine::ReleaseInProcess() {
  // Destroyed behind the lock: that waits for the devices.
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
