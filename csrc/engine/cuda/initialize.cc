// Prepares a call before it is enqueued: computes its plans, finds its communicator,
// and checks that the ranks agree on the call.
#include <unistd.h>

#include <algorithm>
#include <utility>

#include "engine/cuda/cuda_engine.h"
#include "engine/cuda/multicast_reduce.h"
#include "gemm/cuda/fp8_support.h"
#include "gemm/cuda/gemm_plan_cache.h"
#include "platform/error.h"

namespace jax_ub {

namespace {

// The sizes of heaps (device memory that contains the slots) of groups within this
// process are rounded up to multiples of this size, so that calls of similar sizes can
// share a heap.
constexpr int64_t kHeapStepBytes = int64_t{8} << 20;

// Returns the alignment of the tensor's address in bytes: the largest power of two of
// which the address is a multiple, up to the largest alignment that affects GEMM plans.
int AlignmentOf(const Tensor& tensor) {
  const auto address = reinterpret_cast<uintptr_t>(tensor.data);
  return static_cast<int>(
      std::min<uintptr_t>(address & -address, kPlannedAlignmentBytes));
}

std::vector<int> AlignmentsOf(const RankCall& call) {
  std::vector<int> alignments;
  for (const Tensor& tensor : call.operands) alignments.push_back(AlignmentOf(tensor));
  for (const Tensor& tensor : call.results) alignments.push_back(AlignmentOf(tensor));
  return alignments;
}

GemmOptions OptionsOf(const CallAttributes& at, const Gpu& gpu) {
  GemmOptions options;
  const int margin = IsLocalCall(at) ? 0 : at.kernel_options.sm_margin;
  if (margin > 0) options.sm_target = std::max(gpu.num_sms() - margin, 1);
  options.allow_tf32 = at.kernel_options.allow_tf32;
  options.transposes_fp8 = at.kernel_options.transposes_fp8;
  options.algorithm = at.kernel_options.gemm_algorithm;
  return options;
}

std::vector<int64_t> DevicesOf(const CallAttributes& at, int group) {
  const auto first = at.ranks.begin() + group * at.num_ranks;
  return {first, first + at.num_ranks};
}

}  // namespace

void CudaEngine::Initialize(CudaCallSite& site, int ordinal, const RankCall& call) {
  try {
    const DeviceRank device_rank = DeviceRankOf(site, ordinal);
    if (device_rank.has_peers)
      return InitializeWithPeers(site, ordinal, device_rank, call);
    CheckCall(site.attributes_, call);
    Load(site, ordinal, *Plan(site, ordinal, device_rank, call), call);
  } catch (...) {
    ++num_failed_;
    throw;
  }
}

void CudaEngine::InitializeWithPeers(CudaCallSite& site,
                                     int ordinal,
                                     const DeviceRank& device_rank,
                                     const RankCall& call) {
  const auto declare_rejections = [&](const auto& step) {
    try {
      return step();
    } catch (...) {
      Declare(site, ordinal, device_rank, call, std::current_exception());
      throw;
    }
  };
  std::shared_ptr<const Preparation> preparation;
  const auto communicator = declare_rejections([&] {
    CheckCall(site.attributes_, call);
    preparation = Plan(site, ordinal, device_rank, call);
    return Bind(site, *preparation);
  });
  communicator->ThrowIfFailed();
  declare_rejections([&] { Load(site, ordinal, *preparation, call); });
  Declare(site, ordinal, device_rank, call, nullptr);
  communicator->ThrowIfFailed();
}

CudaEngine::DeviceRank CudaEngine::DeviceRankOf(const CudaCallSite& site, int ordinal) {
  const CallAttributes& at = site.attributes_;
  if (IsLocalCall(at)) return {};
  const int64_t device = DeviceOf(ordinal);
  const auto device_rank = site.flat_ranks_.find(device);
  if (device_rank == site.flat_ranks_.end()) {
    throw CommunicatorError("CommunicatorError: jax_ub." + at.label + ": device " +
                            std::to_string(device) +
                            " is not among the devices of the mesh axis");
  }
  const auto partition = std::find(at.devices.begin(), at.devices.end(), device);
  return {static_cast<int>(device_rank->second / at.num_ranks),
          static_cast<int>(device_rank->second % at.num_ranks), at.num_ranks > 1,
          static_cast<uint32_t>(partition - at.devices.begin())};
}

std::shared_ptr<const CudaCallSite::Preparation> CudaEngine::Plan(
    CudaCallSite& site,
    int ordinal,
    const DeviceRank& device_rank,
    const RankCall& call) {
  std::vector<int> alignments = AlignmentsOf(call);
  {
    std::lock_guard lock(site.mutex_);
    const auto& known = site.preparations_[ordinal];
    if (known && known->alignments == alignments) return known;
  }
  auto planned = std::make_shared<Preparation>();
  planned->device_rank = device_rank;
  planned->alignments = std::move(alignments);
  if (device_rank.has_peers)
    planned->tag = SignatureOf(site, device_rank.rank, call).tag();
  planned->plan = PlanCall(site.attributes_, call, device_rank.rank);
  return planned;
}

void CudaEngine::Load(CudaCallSite& site,
                      int ordinal,
                      const Preparation& planned,
                      const RankCall& call) {
  if (planned.gpu != nullptr) return;
  const CallAttributes& at = site.attributes_;
  auto preparation = std::make_shared<Preparation>(planned);
  Gpu& gpu = GpuOf(ordinal);
  const ScopedContext current(driver_, gpu.context());
  preparation->gpu = &gpu;
  preparation->options = OptionsOf(at, gpu);
  if (at.has_scales) {
    const std::string reason =
        WhyNoFp8(ScaledUnitOf(at, call), gpu.capability(), library_.version);
    if (!reason.empty()) throw UnsupportedError("jax_ub." + at.label + ": " + reason);
  }
  // Plans one GEMM. The workspace is not allocated yet, so a fake address with the same
  // alignment is used.
  const auto prepare = [&](Lane, const GemmProblem& problem) {
    gpu.gemm().Prepare(
        problem, preparation->options,
        {kWorkspaceAlignmentBytes,
         CudaGemm::WorkspaceBytes(problem, preparation->options.transposes_fp8)});
  };
  PlanCall(at, call, planned.device_rank.rank, prepare);
  if (nvls_ && ReducesByMulticast(at, call, planned.plan.slots)) {
    preparation->by_multicast = PlanByMulticast(at, call, planned.plan.slots, prepare);
  }
  if (!IsLocalCall(at)) {
    std::lock_guard lock(gpu.mutex());
    StreamLanes& lanes = gpu.lanes().Find(at.kernel_options);
    lanes.ReserveEvents(StreamDevice::NumEvents(planned.plan.workspace, lanes));
    if (preparation->by_multicast) {
      lanes.ReserveEvents(StreamDevice::NumEvents(*preparation->by_multicast, lanes));
    }
  }
  std::lock_guard lock(site.mutex_);
  site.preparations_[ordinal] = std::move(preparation);
}

// Returns the communicator for the call. If the communicator has failed, replaces it by
// the newest communicator of the group, unless a captured graph contains addresses of
// the failed communicator.
std::shared_ptr<CudaCommunicator> CudaEngine::Bind(CudaCallSite& site,
                                                   const Preparation& preparation) {
  const DeviceRank& device_rank = preparation.device_rank;
  std::lock_guard lock(site.mutex_);
  CudaCallSite::Binding& binding = site.bindings_[device_rank.group];
  if (binding.communicator && (binding.captured || !binding.communicator->failure())) {
    return binding.communicator;
  }
  // A failed attempt to find a communicator is reported once per rank. The next call of
  // a rank that has reported the failure makes a new attempt.
  const bool is_notified_first = binding.notified_ranks.insert(device_rank.rank).second;
  if (binding.rejection && is_notified_first) std::rethrow_exception(binding.rejection);
  binding.notified_ranks = {device_rank.rank};
  const SlotRequirements& slots = preparation.plan.slots;
  try {
    auto communicator = FindCommunicator(site.attributes_, device_rank.group, slots);
    if (!communicator->failure()) {
      // Throws if the communicator has too little memory for the slots (receive
      // buffers) of the call.
      communicator->AddressSlots(slots.num_slots, slots.slot_bytes);
    }
    binding.number =
        communicator->NumberOf({site.attributes_.label, site.attributes_.devices});
    binding.communicator = std::move(communicator);
    binding.rejection = nullptr;
  } catch (...) {
    binding.rejection = std::current_exception();
    throw;
  }
  return binding.communicator;
}

GpuCallSignature CudaEngine::SignatureOf(CudaCallSite& site,
                                         int rank,
                                         const RankCall& call) {
  const CallAttributes& at = site.attributes_;
  GpuCallSignature signature = {.rank = rank};
  {
    std::lock_guard lock(site.mutex_);
    if (site.name_.empty()) {
      // The name identifies the call site in all processes. Without a channel, no other
      // process runs the call site. The process id and a counter then make the name
      // unique.
      site.name_ = at.channel.empty()
                       ? std::to_string(getpid()) + "/" + std::to_string(num_sites_++)
                       : at.channel;
    }
    signature.site = site.name_;
  }
  signature.call = DescribeCall(at, call) + DescribeKernelOptions(at.kernel_options);
  return signature;
}

// Sends the rank's signature of the call (op, shapes, dtypes, options) to its peers,
// once per call site and communicator. The peers compare the n-th signatures of all
// ranks. If this rank rejects the call, the signature makes the peers reject it.
void CudaEngine::Declare(CudaCallSite& site,
                         int ordinal,
                         const DeviceRank& device_rank,
                         const RankCall& call,
                         const std::exception_ptr& rejection) {
  const CallAttributes& at = site.attributes_;
  std::shared_ptr<CudaCommunicator> communicator;
  bool is_declared = false;
  {
    std::lock_guard lock(site.mutex_);
    communicator = site.bindings_[device_rank.group].communicator;
    if (!communicator) communicator = FindJoined(DevicesOf(at, device_rank.group));
    // Without a communicator, all ranks of the group are in this process. All of them
    // find the same error, so no rank needs a message from another rank.
    if (!communicator) return;
    std::weak_ptr<CudaCommunicator>& declared = site.declared_[ordinal];
    is_declared = declared.lock() == communicator;
    if (!rejection) declared = communicator;
  }
  if (is_declared) {
    // This rank has already sent a signature that accepts the call. A later rejection
    // must therefore fail the communicator.
    if (!rejection) return;
    return communicator->Poison(std::make_exception_ptr(
        CommunicatorError("CommunicatorError: jax_ub." + at.label + ": " +
                          communicator->DescribeRank(device_rank.rank) +
                          " failed: " + TextOf(rejection))));
  }
  GpuCallSignature signature = SignatureOf(site, device_rank.rank, call);
  if (rejection) signature.rejection = TextOf(rejection);
  communicator->Declare(signature);
}

std::shared_ptr<CudaCommunicator> CudaEngine::FindJoined(
    const std::vector<int64_t>& devices) {
  std::lock_guard lock(mutex_);
  for (const Joined& joined : joined_) {
    if (joined.devices == devices) return joined.communicator;
  }
  return nullptr;
}

std::shared_ptr<CudaCommunicator> CudaEngine::FindCommunicator(
    const CallAttributes& at, int group, const SlotRequirements& slots) {
  const std::vector<int64_t> devices = DevicesOf(at, group);
  if (auto joined = FindJoined(devices)) return joined;
  const std::vector<int> ordinals = OrdinalsOf(at, devices);
  const int64_t need_bytes = slots.num_slots * CudaSlots::StrideOf(slots.slot_bytes);
  // Creating or freeing a heap waits for devices, whose work may depend on calls that
  // are not enqueued yet. A separate mutex is held meanwhile instead of `mutex_`, so
  // that only calls that need another heap are blocked.
  std::shared_ptr<CudaCommunicator> outgrown;  // freed after the locks are released
  std::lock_guard making(making_mutex_);
  {
    std::lock_guard lock(mutex_);
    const std::shared_ptr<CudaCommunicator>& newest = in_process_[ordinals];
    if (newest && newest->slots_bytes() >= need_bytes) return newest;
    // All Gpu objects, which load their kernels at construction, are created before any
    // device can wait for another device.
    for (const int ordinal : ordinals) GpuOfLocked(ordinal);
  }
  auto made = CudaCommunicator::Make(
      driver_, ordinals,
      (need_bytes + kHeapStepBytes - 1) / kHeapStepBytes * kHeapStepBytes, "in_process",
      nvls_);
  std::lock_guard lock(mutex_);
  all_.push_back(made);
  outgrown = std::exchange(in_process_[ordinals], made);
  return made;
}

std::vector<int> CudaEngine::OrdinalsOf(const CallAttributes& at,
                                        const std::vector<int64_t>& devices) {
  std::vector<int> ordinals;
  std::lock_guard lock(mutex_);
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
  return ordinals;
}

}  // namespace jax_ub
