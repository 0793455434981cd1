#include "transport/cuda/communicator.h"

#include <algorithm>
#include <chrono>
#include <stdexcept>
#include <thread>
#include <utility>

#include "platform/error.h"
#include "platform/file_descriptor.h"
#include "transport/process/message.h"
#include "transport/process/setup_exchange.h"

namespace jax_ub {

namespace {

// Maximum time in seconds that the host waits for messages of the peers after a
// failure. It waits for the cause of the failure, and for the close messages.
constexpr double kFailedPatienceS = 5;

// The interval at which the host checks whether the cause of a failure is known, while
// it waits for the cause.
constexpr std::chrono::milliseconds kCheckInterval{1};

// Version of the heap layout and the messages. Must be incremented with every change.
constexpr int kProtocol = 3;

// Returns a description of the group and the heap layout. In the handshake, every
// process checks that all processes have the same description.
std::string SetupText(const ProcessGroup& group, const HeapLayout& layout, bool nvls) {
  return group.RanksText() + ", slots of " + std::to_string(layout.slots_bytes()) +
         " bytes on GPUs, " + (nvls ? "NVLS, " : "") + "protocol " +
         std::to_string(kProtocol);
}

}  // namespace

CudaCommunicator::CudaCommunicator(ProcessGroup group,
                                   const HeapLayout& layout,
                                   GroupHeaps heaps,
                                   std::vector<ConnectedPeer> connected_peers,
                                   double timeout_s)
    : group_(std::move(group)),
      layout_(layout),
      timeout_s_(timeout_s),
      heaps_(std::move(heaps)),
      size_bytes_(heaps_.size_bytes()),
      connected_peers_(std::move(connected_peers)),
      signatures_(group_.num_ranks()),
      failure_(group_,
               {.fail_waits = [this](const auto&) { FailWaits(); },
                .set_lost = [this](int process_index,
                                   const auto& how) { SetLost(process_index, how); },
                .on_signature = [this](const auto& event) { OnSignature(event); }}) {
  for (const ConnectedPeer& peer : connected_peers_)
    num_connected_ += peer.connection ? 1 : 0;
  failure_.Watch(connected_peers_);
}

CudaCommunicator::~CudaCommunicator() {
  Close();
  if (!IsForkedChild()) return;
  // A forked child must not free the heaps: the CUDA driver does not work in the child,
  // and the memory belongs to the parent. So the child leaks them.
  static_cast<void>(new GroupHeaps(std::move(heaps_)));
}

std::string CudaCommunicator::DescribeRank(int rank) const {
  if (group_.num_processes() == 1) return "rank " + std::to_string(rank);
  const int process_index = group_.process_index_of_rank(rank);
  return group_.DescribeRank(rank, connected_peers_[process_index].pid);
}

// Returns the name of a rank, with " (it is stopped)" if its process is stopped. The
// error messages of waits contain this text.
std::string CudaCommunicator::NameAndStateOf(int rank) const {
  return DescribeRank(rank) +
         DescribeIfStopped(
             connected_peers_[group_.process_index_of_rank(rank)].seen_pid);
}

// Returns an error record that a local device has filled, or nullptr. If several
// records are filled, prefers a record that states the cause of the failure to a record
// that only states that a peer failed.
const ErrorRecord* CudaCommunicator::FilledRecord() const {
  const ErrorRecord* found = nullptr;
  for (int n = 0; n < num_own(); ++n) {
    if (CodeOf(record(n)) == ErrorRecord::kNone) continue;
    if (IsOwnFault(record(n))) return &record(n);
    found = &record(n);
  }
  return found;
}

std::exception_ptr CudaCommunicator::FaultOf(const ErrorRecord& record) {
  CallSiteName site{group_.name(), {}};
  {
    std::lock_guard lock(mutex_);
    if (record.call < sites_.size()) site = sites_[record.call];
  }
  return DescribeFault(
      record, site, [this](int rank) { return NameAndStateOf(rank); },
      [this](uint32_t tag) { return CallOf(tag); });
}

// Returns whether FaultOf(record) states the cause of the failure. The cause is unknown
// if the record only states that a peer failed, or if the message that describes a
// peer's call has not arrived yet.
bool CudaCommunicator::KnowsCauseOf(const ErrorRecord& record) {
  if (!IsOwnFault(record)) return false;
  std::lock_guard lock(mutex_);
  return record.tag == 0 ||
         (calls_.contains(record.tag) && calls_.contains(record.other_tag));
}

// Sleeps for kCheckInterval, so that a message with the cause of a failure can arrive,
// and returns true. If kFailedPatienceS seconds have passed since the first call,
// returns false without sleeping.
bool CudaCommunicator::AwaitCause() {
  {
    std::lock_guard lock(mutex_);
    if (!cause_deadline_) cause_deadline_ = Deadline::After(kFailedPatienceS);
    if (cause_deadline_->Expired()) return false;
  }
  std::this_thread::sleep_for(kCheckInterval);
  return true;
}

std::string CudaCommunicator::CallOf(uint32_t tag) {
  std::lock_guard lock(mutex_);
  const auto found = calls_.find(tag);
  if (found != calls_.end()) return found->second;
  return "a call site that this process does not know (tag " + std::to_string(tag) +
         ")";
}

std::exception_ptr CudaCommunicator::failure() {
  const ErrorRecord* filled = nullptr;
  do {
    if (const std::exception_ptr reason = failure_.reason()) return reason;
    if (is_closed_.load()) return nullptr;  // Close is running and sets the reason
    filled = FilledRecord();
    if (filled == nullptr) return nullptr;
  } while (!KnowsCauseOf(*filled) && AwaitCause());
  const std::exception_ptr fault = FaultOf(*filled);
  // If the record only states that a peer has failed, the communicator is not poisoned,
  // because the peer will send the cause.
  if (!IsOwnFault(*filled)) return fault;
  failure_.Poison(fault);
  return failure_.reason();
}

void CudaCommunicator::FailWaits() {
  for (int n = 0; n < num_own(); ++n) SetPoisoned(record(n));
}

void CudaCommunicator::SetLost(int process_index, const std::string& how) {
  if (!how.empty()) FailWaits();
  std::lock_guard lock(mutex_);
  --num_connected_;
  disconnected_.notify_all();
  if (!how.empty() || has_closed_.load()) return;
  who_closed_ = group_.Describe(process_index, connected_peers_[process_index].pid);
  has_closed_.store(true);
}

void CudaCommunicator::Add(const GpuCallSignature& signature) {
  if (failure_.reason()) return;
  std::optional<GpuCallSignature> other;
  {
    std::lock_guard lock(mutex_);
    calls_.try_emplace(signature.tag(),
                       signature.call + " (call site " + signature.site + ")");
    other = signatures_.Add(signature);
  }
  if (!other) return;
  // The two contradicting signatures are sorted by rank, so that all processes report
  // the same error.
  const auto& [first, second] = std::minmax(
      signature, *other, [](const auto& a, const auto& b) { return a.rank < b.rank; });
  std::string text = group_.ErrorPrefix();
  if (first.call != second.call) {
    text += DescribeRank(first.rank) + " and " + DescribeRank(second.rank) +
            " do not agree: " + first.call + "; and " + second.call + ", respectively";
  } else {
    const bool is_first = !first.rejection.empty();
    const GpuCallSignature& rejected = is_first ? first : second;
    text += DescribeRank(rejected.rank) + " rejected the call that " +
            DescribeRank((is_first ? second : first).rank) +
            " is ready for: " + rejected.call + ": " + rejected.rejection;
  }
  failure_.Poison(std::make_exception_ptr(CommunicatorError(text)));
}

void CudaCommunicator::OnSignature(const PeerEvent& event) {
  const auto signature = GpuCallSignature::Unpack(event.text);
  // A signature is ignored unless the process that sent it owns the rank in it.
  if (signature && signature->rank >= 0 && signature->rank < group_.num_ranks() &&
      group_.process_index_of_rank(signature->rank) == event.process) {
    Add(*signature);
  }
}

// A process sends its close message after its devices have finished. From then on, its
// devices do not write to the memory of peers. If a peer does not send its close
// message in time, memory that the peer has opened by CUDA IPC is kept until this
// process exits. Virtual memory can be freed, because the driver keeps it while any
// process has it mapped.
void CudaCommunicator::Close() {
  if (failure_.IsForkedChild() || is_closed_.exchange(true)) return;
  const Driver& driver = heaps_.devices().driver();
  for (const Context& context : heaps_.devices().contexts()) {
    try {
      const ScopedContext scoped(driver, context.get());
      // Errors are ignored: after an error, the context has no work to wait for.
      driver.CtxSynchronize();
    } catch (const SystemError&) {
      continue;
    }
  }
  // If a local device has failed and no call has reported it, the failure is sent to
  // the peers, because their hosts do not know it.
  const ErrorRecord* const filled = failure_.reason() ? nullptr : FilledRecord();
  if (filled != nullptr && IsOwnFault(*filled)) failure_.Poison(FaultOf(*filled));
  failure_.SendClose();
  const double patience_s =
      failure_.reason() ? std::min(kFailedPatienceS, timeout_s_) : timeout_s_;
  {
    std::unique_lock lock(mutex_);
    const bool all_disconnected = disconnected_.wait_until(
        lock, Deadline::After(patience_s).time(), [&] { return num_connected_ == 0; });
    if (!all_disconnected) heaps_.FreeAtExit();
  }
  failure_.Close();
  heaps_.Release();
}

std::shared_ptr<CudaCommunicator> CudaCommunicator::Make(
    const Driver& driver,
    const std::vector<int>& ordinals,
    int64_t slots_bytes,
    const std::string& name,
    bool nvls) {
  ProcessGroup group({std::vector<int>(ordinals.size(), 0), 0, name});
  const HeapLayout layout(slots_bytes);
  try {
    GroupHeaps heaps = GroupHeaps::InProcess(driver, ordinals, layout, group, nvls);
    return std::shared_ptr<CudaCommunicator>(
        new CudaCommunicator(std::move(group), layout, std::move(heaps),
                             std::vector<ConnectedPeer>(1), 0.0));
  } catch (const SystemError& error) {
    throw CommunicatorError("CommunicatorError: jax_ub." + name + ": " + error.what());
  }
}

std::shared_ptr<CudaCommunicator> CudaCommunicator::Connect(
    std::unique_ptr<CudaEndpoint> endpoint,
    const GroupMembership& membership,
    const std::map<int, PeerAddress>& peers,
    const std::map<int, Capabilities>& capabilities_of,
    double timeout_s) {
  const Deadline deadline = Deadline::After(timeout_s);
  ProcessGroup group(membership);
  const HeapLayout layout = endpoint->layout_;
  const bool nvls = endpoint->nvls_;
  if (group.ranks_of(group.own()).size() !=
      static_cast<size_t>(endpoint->devices_->num_ranks())) {
    throw std::invalid_argument(
        "jax_ub." + group.name() + ": the endpoint has heaps of " +
        std::to_string(endpoint->devices_->num_ranks()) + " ranks, the process has " +
        std::to_string(group.ranks_of(group.own()).size()));
  }
  std::map<int, Capabilities> all_capabilities = capabilities_of;
  all_capabilities[membership.process] = endpoint->capabilities();
  const SharingDecision decision = Agree(membership.process_of_rank, all_capabilities);
  if (!decision.rejection.empty()) {
    throw UnsupportedError("jax_ub." + group.name() + ": " + decision.rejection);
  }
  if (!decision.spans_hosts) group.CheckAddresses(peers);
  endpoint->devices_->MakeRecords();
  const FileDescriptor nothing;
  std::vector<ConnectedPeer> connected_peers =
      Handshake(endpoint->endpoint_, group, peers, SetupText(group, layout, nvls),
                nothing, nullptr)
          .Run(timeout_s);
  SetupExchange exchange(group, connected_peers);
  try {
    GroupHeaps heaps = GroupHeaps::Shared(
        std::move(endpoint->devices_), std::move(endpoint->heaps_), group, layout,
        decision, all_capabilities, nvls, exchange, deadline);
    return std::shared_ptr<CudaCommunicator>(
        new CudaCommunicator(std::move(group), layout, std::move(heaps),
                             std::move(connected_peers), timeout_s));
  } catch (const UnsupportedError&) {
    throw;  // all processes throw the same error, so there is no need to send it
  } catch (const CommunicatorError&) {
    exchange.BroadcastFailure(std::current_exception());
    throw;
  } catch (const SystemError& error) {
    const auto failure =
        std::make_exception_ptr(CommunicatorError(group.ErrorPrefix() + error.what()));
    exchange.BroadcastFailure(failure);
    std::rethrow_exception(failure);
  }
}

SlotAddresses CudaCommunicator::AddressSlots(int num_slots, int64_t slot_bytes) const {
  if (num_slots > HeapLayout::kMaxSlots ||
      num_slots * CudaSlots::StrideOf(slot_bytes) > slots_bytes()) {
    throw UnsupportedError(
        "jax_ub." + name() + ": " + std::to_string(num_slots) + " slots of " +
        std::to_string(slot_bytes) + " bytes do not fit into a heap of " +
        std::to_string(slots_bytes()) + " bytes with " +
        std::to_string(HeapLayout::kMaxSlots) +
        " flags: give initialize_ub a larger shape, or the name fewer num_splits");
  }
  const CUdeviceptr multicast = heaps_.multicast();
  return {num_slots, slot_bytes,
          multicast == 0 ? 0 : HeapLayout::AddressAt(multicast).slots};
}

uint32_t CudaCommunicator::NumberOf(const CallSiteName& site) {
  std::lock_guard lock(mutex_);
  const auto found = std::find(sites_.begin(), sites_.end(), site);
  const auto number = static_cast<uint32_t>(found - sites_.begin());
  if (found == sites_.end()) sites_.push_back(site);
  return number;
}

void CudaCommunicator::Declare(const GpuCallSignature& signature) {
  if (failure_.IsForkedChild() || failure_.reason()) return;
  failure_.Broadcast(MessageKind::kSignature, signature.Pack());
  Add(signature);
}

void CudaCommunicator::ThrowIfFailed() {
  if (const std::exception_ptr reason = failure()) {
    std::rethrow_exception(reason);
  }
  if (rejects_calls_.load()) throw failure_.OwnClose();
  if (!has_closed_.load()) return;
  std::lock_guard lock(mutex_);
  throw CommunicatorError(group_.ErrorPrefix() + who_closed_ + " " + kCloseText);
}

}  // namespace jax_ub
