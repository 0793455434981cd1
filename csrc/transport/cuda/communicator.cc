#include "transport/cuda/communicator.h"

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <mutex>
#include <optional>
#include <stdexcept>
#include <utility>

#include "platform/deadline.h"
#include "platform/error.h"
#include "platform/file_descriptor.h"
#include "transport/cuda/group_heaps.h"
#include "transport/process/group_failure.h"
#include "transport/process/handshake.h"
#include "transport/process/message.h"
#include "transport/process/setup_exchange.h"

namespace jax_ub {

namespace {

// After a failure, Close waits at most this many seconds for the peers.
constexpr double kFailedCloseS = 5;

// Must be incremented with every change of the heap layout or the messages.
constexpr int kProtocol = 3;

// Returns a description of the group and the heap layout. In the handshake, every
// process checks that its peers have the same one.
std::string SetupText(const ProcessGroup& group, const HeapLayout& layout, bool nvls) {
  return group.RanksText() + ", slots of " + std::to_string(layout.slots_bytes()) +
         " bytes on GPUs, " + (nvls ? "NVLS, " : "") + "protocol " +
         std::to_string(kProtocol);
}

}  // namespace

struct CudaCommunicator::State {
  State(ProcessGroup its_group,
        HeapLayout its_layout,
        GroupHeaps its_heaps,
        std::vector<ConnectedPeer> its_connected_peers,
        double its_timeout_s);
  ~State();

  std::string NameOf(int rank) const;
  std::string NameAndStateOf(int rank) const;
  std::exception_ptr FaultOfDevices();
  std::exception_ptr Failure();
  void FailWaits();
  void SetLost(int process_index, const std::string& how);
  void Add(const GpuCallSignature& signature);
  void OnSignature(const PeerEvent& event);
  std::string CallOf(uint32_t tag);
  void Close();

  ErrorRecord& record(int n) const { return heaps.devices().record(n); }
  int OwnIndexOf(int rank) const {
    const std::vector<int>& own = group.ranks_of(group.own());
    return static_cast<int>(std::find(own.begin(), own.end(), rank) - own.begin());
  }
  int num_own() const { return heaps.devices().num_ranks(); }

  const ProcessGroup group;
  const HeapLayout layout;
  const double timeout_s;
  GroupHeaps heaps;
  const int64_t size_bytes;
  // What the handshake found out about each process, such as its process id. Indexed by
  // process index. The constructor moves the sockets of the peers to `failure`, which
  // watches them.
  std::vector<ConnectedPeer> connected_peers;
  std::atomic<bool> rejects_calls{false};
  std::atomic<bool> is_closed{false};

  std::mutex mutex;                      // guards the members below, except `failure`
  int num_connected = 0;                 // peers that have neither died nor closed
  std::condition_variable disconnected;  // notified when num_connected decreases
  std::string who_closed;                // the first peer that closed in order; or ""
  std::atomic<bool> has_closed{false};  // whether who_closed is set; read without mutex
  std::vector<CallSiteName> sites;      // indexed by call site number
  // Descriptions of the calls whose signatures were sent or received, by tag.
  std::map<uint32_t, std::string> calls;
  SignatureTable decision;

  // Declared last, so that it is destroyed first: its thread uses the members above.
  GroupFailure failure;
};

CudaCommunicator::State::State(ProcessGroup its_group,
                               HeapLayout its_layout,
                               GroupHeaps its_heaps,
                               std::vector<ConnectedPeer> its_connected_peers,
                               double its_timeout_s)
    : group(std::move(its_group)),
      layout(its_layout),
      timeout_s(its_timeout_s),
      heaps(std::move(its_heaps)),
      size_bytes(heaps.size_bytes()),
      connected_peers(std::move(its_connected_peers)),
      decision(group.num_ranks()),
      failure(group,
              {.fail_waits = [this](const auto&) { FailWaits(); },
               .set_lost = [this](int process_index,
                                  const auto& how) { SetLost(process_index, how); },
               .on_signature = [this](const auto& event) { OnSignature(event); }}) {
  for (const ConnectedPeer& peer : connected_peers)
    num_connected += peer.connection ? 1 : 0;
  failure.Watch(connected_peers);
}

CudaCommunicator::State::~State() {
  Close();
  if (!failure.IsForkedChild()) return;
  // Leaks the heaps in a forked child: the CUDA driver does not work there, and the
  // memory belongs to the parent.
  static_cast<void>(new GroupHeaps(std::move(heaps)));
}

std::string CudaCommunicator::State::NameOf(int rank) const {
  if (group.num_processes() == 1) return "rank " + std::to_string(rank);
  const int process_index = group.process_index_of_rank(rank);
  return group.DescribeRank(rank, connected_peers[process_index].pid);
}

// Returns the name of a rank, with " (it is stopped)" if its process is stopped. Used
// in the error texts of waits.
std::string CudaCommunicator::State::NameAndStateOf(int rank) const {
  return NameOf(rank) +
         DescribeIfStopped(connected_peers[group.process_index_of_rank(rank)].seen_pid);
}

// Returns the failure that a local device has recorded, or nullptr. If several have,
// prefers the record of a cause to a record that only says that a peer failed.
std::exception_ptr CudaCommunicator::State::FaultOfDevices() {
  const ErrorRecord* found = nullptr;
  for (int n = 0; n < num_own(); ++n) {
    const uint32_t code = CodeOf(record(n));
    if (code == ErrorRecord::kNone) continue;
    if (found == nullptr || IsOwnFault(record(n))) found = &record(n);
    if (IsOwnFault(record(n))) break;
  }
  if (found == nullptr) return nullptr;
  CallSiteName site{group.name(), {}};
  {
    std::lock_guard lock(mutex);
    if (found->call < sites.size()) site = sites[found->call];
  }
  return DescribeFault(
      *found, site, [this](int rank) { return NameAndStateOf(rank); },
      [this](uint32_t tag) { return CallOf(tag); });
}

std::string CudaCommunicator::State::CallOf(uint32_t tag) {
  std::lock_guard lock(mutex);
  const auto found = calls.find(tag);
  if (found != calls.end()) return found->second;
  return "a call site that this process does not know (tag " + std::to_string(tag) +
         ")";
}

std::exception_ptr CudaCommunicator::State::Failure() {
  if (const std::exception_ptr reason = failure.reason()) return reason;
  if (is_closed.load()) return nullptr;  // Close is running and sets the reason
  const std::exception_ptr fault = FaultOfDevices();
  if (!fault) return nullptr;
  bool is_own = false;
  for (int n = 0; n < num_own(); ++n) {
    is_own = is_own || IsOwnFault(record(n));
  }
  // If the record only says that a peer has failed, does not poison the communicator,
  // because the peer will send the cause.
  if (!is_own) return fault;
  failure.Poison(fault);
  return failure.reason();
}

void CudaCommunicator::State::FailWaits() {
  for (int n = 0; n < num_own(); ++n) SetPoisoned(record(n));
}

void CudaCommunicator::State::SetLost(int process_index, const std::string& how) {
  if (!how.empty()) FailWaits();
  std::lock_guard lock(mutex);
  --num_connected;
  disconnected.notify_all();
  if (!how.empty() || has_closed.load()) return;
  who_closed = group.Describe(process_index, connected_peers[process_index].pid);
  has_closed.store(true);
}

void CudaCommunicator::State::Add(const GpuCallSignature& signature) {
  if (failure.reason()) return;
  std::optional<GpuCallSignature> other;
  {
    std::lock_guard lock(mutex);
    calls.try_emplace(signature.tag(),
                      signature.call + " (call site " + signature.site + ")");
    other = decision.Add(signature);
  }
  if (!other) return;
  // Sorts the two contradicting signatures by rank, so that all processes report the
  // same error.
  const auto& [first, second] = std::minmax(
      signature, *other, [](const auto& a, const auto& b) { return a.rank < b.rank; });
  std::string text = group.ErrorPrefix();
  if (first.call != second.call) {
    text += NameOf(first.rank) + " and " + NameOf(second.rank) +
            " do not agree: " + first.call + "; and " + second.call + ", respectively";
  } else {
    const bool is_first = !first.rejection.empty();
    const GpuCallSignature& rejected = is_first ? first : second;
    text += NameOf(rejected.rank) + " rejected the call that " +
            NameOf((is_first ? second : first).rank) +
            " is ready for: " + rejected.call + ": " + rejected.rejection;
  }
  failure.Poison(std::make_exception_ptr(CommunicatorError(text)));
}

void CudaCommunicator::State::OnSignature(const PeerEvent& event) {
  const auto signature = GpuCallSignature::Unpack(event.text);
  // Ignores a signature unless the sender owns the rank in it.
  if (signature && signature->rank >= 0 && signature->rank < group.num_ranks() &&
      group.process_index_of_rank(signature->rank) == event.process) {
    Add(*signature);
  }
}

// A process sends its close message after its devices have finished, so it does not
// write to its peers' memory any more. If a peer sends none in time, memory that the
// peer opened with cuIpc is kept until the process exits. Virtual memory can be freed,
// because the driver keeps it as long as a process has it mapped.
void CudaCommunicator::State::Close() {
  if (failure.IsForkedChild() || is_closed.exchange(true)) return;
  const Driver& driver = heaps.devices().driver();
  for (const Context& context : heaps.devices().contexts()) {
    try {
      const ScopedContext scoped(driver, context.get());
      // Ignores the result: after an error, the context has no work to wait for.
      driver.CtxSynchronize();
    } catch (const SystemError&) {
      continue;
    }
  }
  failure.SendClose();
  const double patience_s =
      failure.reason() ? std::min(kFailedCloseS, timeout_s) : timeout_s;
  {
    std::unique_lock lock(mutex);
    const bool all_disconnected = disconnected.wait_until(
        lock, Deadline::After(patience_s).time(), [&] { return num_connected == 0; });
    if (!all_disconnected) heaps.FreeAtExit();
  }
  failure.Close();
  heaps.Release();
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
    return std::shared_ptr<CudaCommunicator>(new CudaCommunicator(
        std::make_unique<State>(std::move(group), layout, std::move(heaps),
                                std::vector<ConnectedPeer>(1), 0.0)));
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
    return std::shared_ptr<CudaCommunicator>(new CudaCommunicator(
        std::make_unique<State>(std::move(group), layout, std::move(heaps),
                                std::move(connected_peers), timeout_s)));
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

CudaCommunicator::CudaCommunicator(std::unique_ptr<State> state)
    : state_(std::move(state)) {}

CudaCommunicator::~CudaCommunicator() = default;

const std::string& CudaCommunicator::name() const { return state_->group.name(); }
int CudaCommunicator::num_ranks() const { return state_->group.num_ranks(); }
const std::vector<int>& CudaCommunicator::local_ranks() const {
  return state_->group.ranks_of(state_->group.own());
}
int CudaCommunicator::ordinal(int local_rank) const {
  return state_->heaps.devices().ordinal(state_->OwnIndexOf(local_rank));
}
std::string CudaCommunicator::DescribeRank(int rank) const {
  return state_->NameOf(rank);
}
std::string CudaCommunicator::how() const { return state_->heaps.how(); }
const std::vector<SharingFallback>& CudaCommunicator::fallbacks() const {
  return state_->heaps.fallbacks();
}
bool CudaCommunicator::has_multicast() const { return state_->heaps.multicast() != 0; }
int64_t CudaCommunicator::slots_bytes() const { return state_->layout.slots_bytes(); }
int64_t CudaCommunicator::size_bytes() const { return state_->size_bytes; }

std::span<const RankSlotAddress> CudaCommunicator::addresses(int local_rank) const {
  return state_->heaps.addresses(state_->OwnIndexOf(local_rank));
}
CUdeviceptr CudaCommunicator::error(int local_rank) const {
  return state_->heaps.devices().record_address(state_->OwnIndexOf(local_rank));
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
  const CUdeviceptr multicast = state_->heaps.multicast();
  return {num_slots, slot_bytes,
          multicast == 0 ? 0 : HeapLayout::AddressAt(multicast).slots};
}

uint32_t CudaCommunicator::NumberOf(const CallSiteName& site) {
  std::lock_guard lock(state_->mutex);
  std::vector<CallSiteName>& sites = state_->sites;
  const auto found = std::find(sites.begin(), sites.end(), site);
  const auto number = static_cast<uint32_t>(found - sites.begin());
  if (found == sites.end()) sites.push_back(site);
  return number;
}

void CudaCommunicator::Declare(const GpuCallSignature& signature) {
  if (state_->failure.IsForkedChild() || state_->failure.reason()) return;
  state_->failure.Broadcast(MessageKind::kSignature, signature.Pack());
  state_->Add(signature);
}

std::exception_ptr CudaCommunicator::failure() { return state_->Failure(); }

void CudaCommunicator::ThrowIfFailed() {
  if (const std::exception_ptr reason = state_->Failure()) {
    std::rethrow_exception(reason);
  }
  if (state_->rejects_calls.load()) throw state_->failure.OwnClose();
  if (!state_->has_closed.load()) return;
  std::lock_guard lock(state_->mutex);
  throw CommunicatorError(state_->group.ErrorPrefix() + state_->who_closed + " " +
                          kCloseText);
}

bool CudaCommunicator::IsForkedChild() const { return state_->failure.IsForkedChild(); }

void CudaCommunicator::Poison(const std::exception_ptr& reason) {
  state_->failure.Poison(reason);
}

void CudaCommunicator::RejectCalls() { state_->rejects_calls.store(true); }

void CudaCommunicator::Close() { state_->Close(); }

}  // namespace jax_ub
