#include "transport/cuda/communicator.h"

#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <mutex>
#include <optional>
#include <stdexcept>
#include <string_view>
#include <utility>

#include "platform/deadline.h"
#include "platform/error.h"
#include "platform/file_descriptor.h"
#include "transport/cuda/group_heaps.h"
#include "transport/process/handshake.h"
#include "transport/process/message.h"
#include "transport/process/notes.h"
#include "transport/process/peers.h"

namespace jax_ub {

namespace {

constexpr std::string_view kErrorBegins = "CommunicatorError: ";

// How long Close waits for peers after a failure.
constexpr double kFailedCloseS = 5;

// Raised with every change of what lies in a heap, or of what processes say.
constexpr int kProtocol = 2;

// That all say the same: what they share, and how it lies.
std::string SetupText(const Group& group, const HeapLayout& layout, bool nvls) {
  return group.RanksText() + ", slots of " + std::to_string(layout.slots_bytes()) +
         " bytes on GPUs, " + (nvls ? "NVLS, " : "") + "protocol " +
         std::to_string(kProtocol);
}

}  // namespace

struct CudaCommunicator::State {
  State(Group its_group,
        HeapLayout its_layout,
        GroupHeaps its_heaps,
        std::vector<Partner> its_partners,
        double its_timeout_s);
  ~State();

  std::string NameOf(int rank) const;
  std::string NameAndStateOf(int rank) const;
  std::exception_ptr FaultOfDevices();
  std::exception_ptr Failure();
  void Poison(const std::exception_ptr& reason);
  void Fail(const std::exception_ptr& reason);
  void Add(const CallStatement& statement);
  void Hear(const PeerNews& news);
  void Lose(int place, const std::string& how);
  void Leave(int place, bool in_order);
  CommunicatorError OwnClose() const;
  void Close();

  // In a child of fork, which has no part in this: its parent goes on.
  bool IsCopy() const { return getpid() != owner; }
  ErrorRecord& record(int n) const { return heaps.devices().record(n); }
  int OwnIndexOf(int rank) const {
    const std::vector<int>& own = group.ranks_of(group.own());
    return static_cast<int>(std::find(own.begin(), own.end(), rank) - own.begin());
  }
  int num_own() const { return heaps.devices().num_ranks(); }

  const pid_t owner = getpid();
  const Group group;
  const HeapLayout layout;
  const double timeout_s;
  GroupHeaps heaps;
  const int64_t size_bytes;
  std::vector<pid_t> pids;       // [place], as they know themselves
  std::vector<pid_t> seen_pids;  // [place], as seen from here; 0: it is not
  std::atomic<bool> refuses_calls{false};
  std::atomic<bool> is_closed{false};
  std::atomic<bool> has_failed{false};  // there is a `failure`

  std::mutex saying_mutex;   // held from what peers are told to what follows from it
  mutable std::mutex mutex;  // guards what follows
  std::exception_ptr failure;
  std::vector<bool> is_gone;            // [place]: closed or lost
  std::string who_closed;               // the first peer that did
  std::atomic<bool> has_closed{false};  // there is one
  std::condition_variable gone;
  std::vector<SiteName> sites;  // [number]
  CallAgreement agreement;

  std::unique_ptr<Peers> peers;  // the last: its thread uses what is above
};

CudaCommunicator::State::State(Group its_group,
                               HeapLayout its_layout,
                               GroupHeaps its_heaps,
                               std::vector<Partner> its_partners,
                               double its_timeout_s)
    : group(std::move(its_group)),
      layout(its_layout),
      timeout_s(its_timeout_s),
      heaps(std::move(its_heaps)),
      size_bytes(heaps.size_bytes()),
      pids(group.num_processes(), 0),
      seen_pids(group.num_processes(), 0),
      is_gone(group.num_processes(), true),
      agreement(group.num_ranks()) {
  std::vector<Peer> connected;
  for (int place = 0; place < group.num_processes(); ++place) {
    Partner& partner = its_partners[place];
    pids[place] = place == group.own() ? getpid() : partner.pid;
    if (!partner.connection) continue;
    // A process that is its own peer, in tests, does not outlive itself.
    seen_pids[place] = partner.seen_pid == owner ? 0 : partner.seen_pid;
    is_gone[place] = false;
    connected.push_back({place, std::move(partner.connection), seen_pids[place]});
  }
  peers = std::make_unique<Peers>(std::move(connected));
  if (group.num_processes() > 1) {
    peers->Watch(group, [this](const PeerNews& news) { Hear(news); });
  }
}

CudaCommunicator::State::~State() {
  Close();
  if (!IsCopy()) return;
  // The driver does not work here, and what it lent is the parent's.
  peers->Forget();
  static_cast<void>(new GroupHeaps(std::move(heaps)));
}

std::string CudaCommunicator::State::NameOf(int rank) const {
  if (group.num_processes() == 1) return "rank " + std::to_string(rank);
  const int place = group.place_of_rank(rank);
  return group.DescribeRank(rank, pids[place]);
}

// With what it is doing at this moment, as seen from here: for the messages of a wait.
std::string CudaCommunicator::State::NameAndStateOf(int rank) const {
  return NameOf(rank) + DescribeIfStopped(seen_pids[group.place_of_rank(rank)]);
}

// What the local devices recorded: a rank's own reason rather than that of a peer.
std::exception_ptr CudaCommunicator::State::FaultOfDevices() {
  const ErrorRecord* found = nullptr;
  for (int n = 0; n < num_own(); ++n) {
    const uint32_t code = CodeOf(record(n));
    if (code == ErrorRecord::kNone) continue;
    if (found == nullptr || IsOwnFault(record(n))) found = &record(n);
    if (IsOwnFault(record(n))) break;
  }
  if (found == nullptr) return nullptr;
  SiteName site{group.name(), {}};
  {
    std::lock_guard lock(mutex);
    if (found->call < sites.size()) site = sites[found->call];
  }
  return DescribeFault(*found, site, [this](int rank) { return NameAndStateOf(rank); });
}

std::exception_ptr CudaCommunicator::State::Failure() {
  if (has_failed.load()) {
    std::lock_guard lock(mutex);
    return failure;
  }
  if (is_closed.load()) return nullptr;  // Close is at it
  const std::exception_ptr fault = FaultOfDevices();
  if (!fault) return nullptr;
  bool is_own = false;
  for (int n = 0; n < num_own(); ++n) {
    is_own = is_own || IsOwnFault(record(n));
  }
  // A peer that failed says why, as soon as it looks: that shall be the reason.
  if (!is_own) return fault;
  Poison(fault);
  std::lock_guard lock(mutex);
  return failure;
}

// Everybody is told before any own wait fails, so that whoever leaves because of it has
// said why before.
void CudaCommunicator::State::Poison(const std::exception_ptr& reason) {
  if (IsCopy()) return;
  std::lock_guard saying(saying_mutex);
  if (has_failed.load()) return;
  PoisonMessage told = PoisonMessageOf(reason);
  if (!told.text.starts_with(kErrorBegins)) {
    told.text = group.ErrorPrefix() + group.Describe(group.own(), owner) +
                " failed: " + told.text;
  }
  peers->Say(told.kind, told.text);
  Fail(reason);
}

void CudaCommunicator::State::Fail(const std::exception_ptr& reason) {
  {
    std::lock_guard lock(mutex);
    if (failure) return;
    failure = reason;
    has_failed.store(true);
  }
  for (int n = 0; n < num_own(); ++n) SetPoisoned(record(n));
}

void CudaCommunicator::State::Add(const CallStatement& statement) {
  std::optional<CallStatement> other;
  {
    std::lock_guard lock(mutex);
    if (!failure) other = agreement.Add(statement);
  }
  if (!other) return;
  // In one order, so that all say the same.
  const auto& [first, second] = std::minmax(
      statement, *other, [](const auto& a, const auto& b) { return a.rank < b.rank; });
  std::string text = group.ErrorPrefix();
  if (first.call != second.call) {
    text += NameOf(first.rank) + " and " + NameOf(second.rank) +
            " do not agree: " + first.call + "; and " + second.call + ", respectively";
  } else {
    const bool is_first = !first.refusal.empty();
    const CallStatement& refused = is_first ? first : second;
    text += NameOf(refused.rank) + " refused what " +
            NameOf((is_first ? second : first).rank) +
            " is ready for: " + refused.call + ": " + refused.refusal;
  }
  Poison(std::make_exception_ptr(CommunicatorError(text)));
}

void CudaCommunicator::State::Hear(const PeerNews& news) {
  switch (news.kind) {
    case PeerNews::kStated: {
      const auto statement = CallStatement::Unpack(news.text);
      // Of a rank of its own: what a peer says may be nonsense.
      if (statement && statement->rank >= 0 && statement->rank < group.num_ranks() &&
          group.place_of_rank(statement->rank) == news.process) {
        Add(*statement);
      }
      return;
    }
    case PeerNews::kPoisoned:
      return Poison(std::make_exception_ptr(CommunicatorError(news.text)));
    case PeerNews::kPoisonedByDeadline:
      return Poison(std::make_exception_ptr(DeadlineError(news.text)));
    case PeerNews::kClosed:
      return Leave(news.process, true);
    case PeerNews::kLost:
      return Lose(news.process, news.text);
  }
}

void CudaCommunicator::State::Lose(int place, const std::string& how) {
  // What a peer says of others may be old, or nonsense.
  if (place < 0 || place >= group.num_processes() || place == group.own()) return;
  {
    std::lock_guard saying(saying_mutex);
    {
      std::lock_guard lock(mutex);
      if (is_gone[place]) return;
    }
    peers->Say(MessageKind::kObituary, std::to_string(place));
    Fail(std::make_exception_ptr(CommunicatorError(
        group.ErrorPrefix() + group.Describe(place, pids[place]) + " " + how)));
  }
  Leave(place, false);
}

void CudaCommunicator::State::Leave(int place, bool in_order) {
  std::lock_guard lock(mutex);
  is_gone[place] = true;
  if (in_order && !has_closed.load()) {
    who_closed = group.Describe(place, pids[place]);
    has_closed.store(true);
  }
  gone.notify_all();
}

CommunicatorError CudaCommunicator::State::OwnClose() const {
  return CommunicatorError(
      group.ErrorPrefix() +
      (group.num_processes() == 1 ? "it" : group.Describe(group.own(), owner)) +
      " closed its communicator");
}

// Whoever says goodbye has done all that it was given, and writes to nobody any more.
// Memory by virtual memory management lives as long as somebody has it mapped, so that
// only a peer that opened it by cuIpc can be harmed by not being waited for.
void CudaCommunicator::State::Close() {
  // A child of fork has its parent's connections, and must not say goodbye for it.
  if (IsCopy() || is_closed.exchange(true)) return;
  const Driver& driver = heaps.devices().driver();
  for (const Context& context : heaps.devices().contexts()) {
    try {
      const ScopedContext scoped(driver, context.get());
      // A context that is broken has nothing more to do.
      driver.CtxSynchronize();
    } catch (const SystemError&) {
      continue;
    }
  }
  peers->Say(MessageKind::kGoodbye, "");
  const double patience_s =
      has_failed.load() ? std::min(kFailedCloseS, timeout_s) : timeout_s;
  {
    std::unique_lock lock(mutex);
    const bool all_gone =
        gone.wait_until(lock, Deadline::After(patience_s).time(), [&] {
          return std::find(is_gone.begin(), is_gone.end(), false) == is_gone.end();
        });
    if (!all_gone) heaps.Abandon();
  }
  peers->Close();
  Fail(std::make_exception_ptr(OwnClose()));
  heaps.GiveBack();
}

std::shared_ptr<CudaCommunicator> CudaCommunicator::Make(
    const Driver& driver,
    const std::vector<int>& ordinals,
    int64_t slots_bytes,
    const std::string& name,
    bool nvls) {
  Group group({std::vector<int>(ordinals.size(), 0), 0, name});
  const HeapLayout layout(slots_bytes);
  try {
    GroupHeaps heaps = GroupHeaps::InProcess(driver, ordinals, layout, group, nvls);
    return std::shared_ptr<CudaCommunicator>(
        new CudaCommunicator(std::make_unique<State>(
            std::move(group), layout, std::move(heaps), std::vector<Partner>(1), 0.0)));
  } catch (const SystemError& error) {
    throw CommunicatorError("CommunicatorError: jax_ub." + name + ": " + error.what());
  }
}

std::shared_ptr<CudaCommunicator> CudaCommunicator::Connect(
    std::unique_ptr<CudaEndpoint> endpoint,
    const Membership& membership,
    const std::map<int, PeerAddress>& peers,
    const std::map<int, Offer>& offers,
    double timeout_s) {
  const Deadline deadline = Deadline::After(timeout_s);
  Group group(membership);
  const HeapLayout layout = endpoint->layout_;
  const bool nvls = endpoint->nvls_;
  if (group.ranks_of(group.own()).size() !=
      static_cast<size_t>(endpoint->devices_->num_ranks())) {
    throw std::invalid_argument(
        "jax_ub." + group.name() + ": the endpoint has heaps of " +
        std::to_string(endpoint->devices_->num_ranks()) + " ranks, the process has " +
        std::to_string(group.ranks_of(group.own()).size()));
  }
  std::map<int, Offer> told = offers;
  told[membership.process] = endpoint->offer();
  const Agreement agreement = Agree(membership.process_of_rank, told);
  if (!agreement.refusal.empty()) {
    throw UnsupportedError("jax_ub." + group.name() + ": " + agreement.refusal);
  }
  if (!agreement.spans_hosts) group.CheckAddresses(peers);
  endpoint->devices_->MakeRecords();
  const FileDescriptor nothing;
  std::vector<Partner> partners =
      Handshake(endpoint->endpoint_, group, peers, SetupText(group, layout, nvls),
                nothing, nullptr)
          .Run(timeout_s);
  Notes notes(group, partners);
  try {
    GroupHeaps heaps =
        GroupHeaps::Shared(std::move(endpoint->devices_), std::move(endpoint->heaps_),
                           group, layout, agreement, told, nvls, notes, deadline);
    return std::shared_ptr<CudaCommunicator>(new CudaCommunicator(
        std::make_unique<State>(std::move(group), layout, std::move(heaps),
                                std::move(partners), timeout_s)));
  } catch (const UnsupportedError&) {
    throw;  // all of them do
  } catch (const CommunicatorError&) {
    notes.TellFailure(std::current_exception());
    throw;
  } catch (const SystemError& error) {
    const auto failure =
        std::make_exception_ptr(CommunicatorError(group.ErrorPrefix() + error.what()));
    notes.TellFailure(failure);
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
const std::vector<StepDown>& CudaCommunicator::step_downs() const {
  return state_->heaps.step_downs();
}
bool CudaCommunicator::has_multicast() const { return state_->heaps.multicast() != 0; }
int64_t CudaCommunicator::slots_bytes() const { return state_->layout.slots_bytes(); }
int64_t CudaCommunicator::size_bytes() const { return state_->size_bytes; }

std::span<const RankPlace> CudaCommunicator::places(int local_rank) const {
  return state_->heaps.places(state_->OwnIndexOf(local_rank));
}
CUdeviceptr CudaCommunicator::error(int local_rank) const {
  return state_->heaps.devices().record_address(state_->OwnIndexOf(local_rank));
}

SlotPlaces CudaCommunicator::Place(int num_slots, int64_t slot_bytes) const {
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
          multicast == 0 ? 0 : HeapLayout::PlaceAt(multicast).slots};
}

uint32_t CudaCommunicator::NumberOf(const SiteName& site) {
  std::lock_guard lock(state_->mutex);
  std::vector<SiteName>& sites = state_->sites;
  const auto found = std::find(sites.begin(), sites.end(), site);
  const auto number = static_cast<uint32_t>(found - sites.begin());
  if (found == sites.end()) sites.push_back(site);
  return number;
}

void CudaCommunicator::Declare(const CallStatement& statement) {
  if (state_->IsCopy() || state_->has_failed.load()) return;
  state_->peers->Say(MessageKind::kStatement, statement.Pack());
  state_->Add(statement);
}

std::exception_ptr CudaCommunicator::failure() { return state_->Failure(); }

void CudaCommunicator::ThrowIfFailed() {
  if (const std::exception_ptr reason = state_->Failure()) {
    std::rethrow_exception(reason);
  }
  if (state_->refuses_calls.load()) throw state_->OwnClose();
  if (!state_->has_closed.load()) return;
  std::lock_guard lock(state_->mutex);
  throw CommunicatorError(state_->group.ErrorPrefix() + state_->who_closed + " " +
                          kGoodbyeText);
}

void CudaCommunicator::Poison(const std::exception_ptr& reason) {
  state_->Poison(reason);
}

void CudaCommunicator::RefuseCalls() { state_->refuses_calls.store(true); }

void CudaCommunicator::Close() { state_->Close(); }

}  // namespace jax_ub
