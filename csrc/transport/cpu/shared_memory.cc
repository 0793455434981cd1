#include "transport/cpu/shared_memory.h"

#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <mutex>
#include <utility>

#include "platform/error.h"
#include "platform/shared_mapping.h"
#include "transport/cpu/fate.h"
#include "transport/cpu/slots.h"
#include "transport/process/handshake.h"
#include "transport/process/message.h"
#include "transport/process/peers.h"

namespace jax_ub {

namespace {

constexpr std::string_view kErrorBegins = "CommunicatorError: ";

// Slots begin on cache lines of their own.
constexpr int64_t kSlotAlignment = 64;

}  // namespace

struct SharedCommunicator::State {
  State(Group its_group,
        Layout its_layout,
        std::vector<SharedMapping> its_memories,
        std::vector<Partner> its_partners);
  ~State();

  void Hear(const PeerNews& news);
  void Poison(const std::exception_ptr& reason);
  std::function<void()> FailWaits(const std::exception_ptr& reason);
  void Lose(int process, const std::string& how);
  std::function<void()> SetFailure(const std::exception_ptr& reason);
  void WakeOwn();
  void Close();

  // In a child of fork, which has no part in this: its parent goes on.
  bool IsCopy() const { return getpid() != owner; }

  const pid_t owner = getpid();
  const Group group;
  const Layout layout;
  std::vector<SharedMapping> memories;  // [process]
  Fate fate;
  Lockstep lockstep;
  std::vector<RankArea> areas;                 // [rank]
  std::vector<std::unique_ptr<SlotEnd>> ends;  // [rank]; none of other processes
  std::atomic<bool> is_closed{false};

  std::mutex saying_mutex;   // held from what peers are told to what follows from it
  mutable std::mutex mutex;  // guards the two below
  std::exception_ptr failure;
  std::function<void(const std::exception_ptr&)> on_poison;

  std::unique_ptr<Peers> peers;  // the last: its thread uses what is above
};

namespace {

SharedMapping NewMemory(const Group& group, const Layout& layout) {
  const auto num_own = static_cast<int>(group.ranks_of(group.own()).size());
  try {
    return SharedMapping::Create(layout.size_bytes(num_own));
  } catch (const SystemError& error) {
    throw CommunicatorError(group.ErrorPrefix() + error.what() +
                            ". A smaller shape of initialize_ub needs less");
  }
}

std::vector<Fate::Member> MembersOf(const Group& group,
                                    const std::vector<Partner>& partners) {
  std::vector<Fate::Member> members;
  for (int p = 0; p < group.num_processes(); ++p) {
    const bool is_own = p == group.own();
    members.push_back(
        {group.Describe(p, is_own ? getpid() : partners[p].pid), partners[p].seen_pid});
  }
  return members;
}

// That all say the same: what they share, and how it lies.
std::string SetupText(const Group& group, const Layout& layout) {
  // Raised with every change of what processes share.
  constexpr int kProtocol = 2;
  return group.RanksText() + ", halves of " + std::to_string(layout.half_bytes()) +
         " bytes, protocol " + std::to_string(kProtocol) + "." +
         std::to_string(sizeof(ProcessHeader)) + "." +
         std::to_string(sizeof(AreaHeader));
}

// The memory that a process has passed on.
SharedMapping MapOf(const Group& group,
                    const Layout& layout,
                    int place,
                    const Partner& partner,
                    FileDescriptor memory) {
  if (!memory) {
    throw CommunicatorError(
        group.ErrorPrefix() + group.Describe(place, partner.pid) +
        " passed no memory: are this process's descriptors used up (ulimit -n)?");
  }
  const auto num_ranks = static_cast<int>(group.ranks_of(place).size());
  return SharedMapping::Map(std::move(memory), layout.size_bytes(num_ranks));
}

std::vector<ProcessHeader*> HeadersOf(const Layout& layout,
                                      const std::vector<SharedMapping>& memories) {
  std::vector<ProcessHeader*> headers;
  for (const SharedMapping& memory : memories) {
    headers.push_back(layout.header(memory.data()));
  }
  return headers;
}

}  // namespace

SharedCommunicator::State::State(Group its_group,
                                 Layout its_layout,
                                 std::vector<SharedMapping> its_memories,
                                 std::vector<Partner> its_partners)
    : group(std::move(its_group)),
      layout(its_layout),
      memories(std::move(its_memories)),
      fate(MembersOf(group, its_partners)),
      lockstep(HeadersOf(layout, memories), group.own(), fate),
      areas(group.num_ranks()),
      ends(group.num_ranks()) {
  for (int p = 0; p < group.num_processes(); ++p) {
    const pid_t pid = p == group.own() ? getpid() : its_partners[p].pid;
    const std::vector<int>& ranks = group.ranks_of(p);
    for (int n = 0; n < static_cast<int>(ranks.size()); ++n) {
      std::byte* memory = memories[p].data();
      areas[ranks[n]] = {.doorbell = &layout.area(memory, n)->doorbell,
                         .flags = layout.area(memory, n)->flags,
                         .memory = layout.halves(memory, n),
                         .process = p,
                         .name = group.DescribeRank(ranks[n], pid)};
    }
  }
  for (const int rank : group.ranks_of(group.own())) {
    ends[rank] = std::make_unique<SlotEnd>(rank, areas, fate, 0);
  }
  std::vector<Peer> connected;
  for (int p = 0; p < group.num_processes(); ++p) {
    if (p == group.own()) continue;
    if (its_partners[p].has_left) {
      fate.SetClosed(p);
    } else {
      // A process that is its own peer, in tests, does not outlive itself.
      const pid_t seen = its_partners[p].seen_pid;
      connected.push_back(
          {p, std::move(its_partners[p].connection), seen == owner ? 0 : seen});
    }
  }
  peers = std::make_unique<Peers>(std::move(connected));
  peers->Watch(group, [this](const PeerNews& news) { Hear(news); });
}

SharedCommunicator::State::~State() {
  Close();
  if (!IsCopy()) return;
  peers->Forget();
  for (SharedMapping& memory : memories) memory.Forget();
}

void SharedCommunicator::State::WakeOwn() {
  lockstep.WakeOwn();
  for (const int rank : group.ranks_of(group.own())) Ring(*areas[rank].doorbell);
}

void SharedCommunicator::State::Hear(const PeerNews& news) {
  switch (news.kind) {
    case PeerNews::kPoisoned:
      return Poison(std::make_exception_ptr(CommunicatorError(news.text)));
    case PeerNews::kPoisonedByDeadline:
      return Poison(std::make_exception_ptr(DeadlineError(news.text)));
    case PeerNews::kStated:
      return;  // here a call says it in shared memory
    case PeerNews::kClosed:
      fate.SetClosed(news.process);
      return WakeOwn();
    case PeerNews::kLost:
      return Lose(news.process, news.text);
  }
}

// Of poison and of deaths everybody is told before any own wait fails, whoever noticed
// first: so whoever leaves because of it has said why before, and no peer takes that for
// the reason.
void SharedCommunicator::State::Poison(const std::exception_ptr& reason) {
  if (IsCopy()) return;
  std::function<void()> call_back;
  {
    std::lock_guard saying(saying_mutex);
    if (fate.poison()) return;
    PoisonMessage told = PoisonMessageOf(reason);
    if (!told.text.starts_with(kErrorBegins)) {
      told.text =
          group.ErrorPrefix() + fate.name(group.own()) + " failed: " + told.text;
    }
    peers->Say(told.kind, told.text);
    call_back = FailWaits(reason);
  }
  WakeOwn();
  call_back();
}

std::function<void()> SharedCommunicator::State::FailWaits(
    const std::exception_ptr& reason) {
  std::lock_guard lock(mutex);
  fate.Poison(reason);
  return SetFailure(reason);
}

void SharedCommunicator::State::Lose(int process, const std::string& how) {
  std::function<void()> call_back;
  {
    std::lock_guard saying(saying_mutex);
    // What a peer says of others may be old, or nonsense.
    if (process < 0 || process >= group.num_processes() || process == group.own() ||
        fate.IsGone(process)) {
      return;
    }
    peers->Say(MessageKind::kObituary, std::to_string(process));
    std::lock_guard lock(mutex);
    fate.SetLost(process, how);
    call_back = SetFailure(std::make_exception_ptr(
        CommunicatorError(group.ErrorPrefix() + fate.DescribeGone(process))));
  }
  WakeOwn();
  call_back();
}

// With the mutex held, so that whoever has seen its wait fail finds the failure here.
// What it returns is to be called without.
std::function<void()> SharedCommunicator::State::SetFailure(
    const std::exception_ptr& reason) {
  if (failure) return [] {};
  failure = reason;
  if (!on_poison) return [] {};
  return [reason, callback = std::move(on_poison)] { callback(reason); };
}

void SharedCommunicator::State::Close() {
  // A child of fork has its parent's connections, and must not say goodbye for it.
  if (getpid() != owner || is_closed.exchange(true)) return;
  std::function<void()> call_back;
  {
    std::lock_guard saying(saying_mutex);
    peers->Say(MessageKind::kGoodbye, "");
    call_back = FailWaits(std::make_exception_ptr(CommunicatorError(
        group.ErrorPrefix() + fate.name(group.own()) + " closed its communicator")));
  }
  WakeOwn();
  call_back();
  peers->Close();
}

std::shared_ptr<SharedCommunicator> SharedCommunicator::Connect(
    std::unique_ptr<Endpoint> endpoint,
    Membership membership,
    const std::map<int, PeerAddress>& peers,
    int64_t half_bytes,
    double timeout_s) {
  Group group(membership);
  const Layout layout(half_bytes);
  group.CheckAddresses(peers);
  std::vector<SharedMapping> memories(group.num_processes());
  SharedMapping& own = memories[group.own()];
  own = NewMemory(group, layout);
  Handshake handshake(
      *endpoint, group, peers, SetupText(group, layout), own.descriptor(),
      [&](int place, const Partner& partner, FileDescriptor memory) {
        memories[place] = MapOf(group, layout, place, partner, std::move(memory));
      });
  std::vector<Partner> partners = handshake.Run(timeout_s);
  own.CloseDescriptor();
  return std::shared_ptr<SharedCommunicator>(
      new SharedCommunicator(std::make_unique<State>(
          std::move(group), layout, std::move(memories), std::move(partners))));
}

SharedCommunicator::SharedCommunicator(std::unique_ptr<State> state)
    : state_(std::move(state)) {}

SharedCommunicator::~SharedCommunicator() = default;

const std::string& SharedCommunicator::name() const { return state_->group.name(); }
int SharedCommunicator::num_ranks() const { return state_->group.num_ranks(); }
const std::vector<int>& SharedCommunicator::local_ranks() const {
  return state_->group.ranks_of(process());
}
const std::vector<int>& SharedCommunicator::processes() const {
  return state_->group.numbers();
}
int SharedCommunicator::num_processes() const { return state_->group.num_processes(); }
int SharedCommunicator::process() const { return state_->group.own(); }
int SharedCommunicator::process_of_rank(int rank) const {
  return state_->group.place_of_rank(rank);
}
bool SharedCommunicator::is_leader() const { return process() == 0; }
std::string SharedCommunicator::DescribeProcess(int process) const {
  return state_->fate.name(process);
}

std::byte* SharedCommunicator::half(int rank, int64_t call) const {
  return state_->areas[rank].memory + call % 2 * half_bytes();
}
int64_t SharedCommunicator::half_bytes() const { return state_->layout.half_bytes(); }
int64_t SharedCommunicator::size_bytes() const {
  return state_->memories[process()].size_bytes();
}

void SharedCommunicator::PostOrder(const Order& order) {
  state_->lockstep.PostOrder(order);
}
Order SharedCommunicator::WaitOrder(int64_t call, const WaitReason& reason) {
  return state_->lockstep.WaitOrder(call, reason);
}
void SharedCommunicator::Announce(int64_t call,
                                  uint64_t signature,
                                  std::string_view text) {
  state_->lockstep.Announce(call, signature, text);
}
Announcement SharedCommunicator::announcement(int process, int64_t call) const {
  return state_->lockstep.announcement(process, call);
}
void SharedCommunicator::Barrier(int64_t call, int phase, const WaitReason& reason) {
  state_->lockstep.Barrier(call, phase, reason);
}

Transport& SharedCommunicator::rank(int local_rank,
                                    int64_t call,
                                    int num_slots,
                                    int64_t slot_bytes) {
  const int64_t aligned =
      (slot_bytes + kSlotAlignment - 1) / kSlotAlignment * kSlotAlignment;
  if (num_slots > kMaxSlots || num_slots * aligned > half_bytes()) {
    throw UnsupportedError(
        "jax_ub." + name() + ": " + std::to_string(num_slots) + " slots of " +
        std::to_string(slot_bytes) + " bytes do not fit into a half of " +
        std::to_string(half_bytes()) + " bytes with " + std::to_string(kMaxSlots) +
        " flags: give initialize_ub a larger shape, or the name fewer num_splits");
  }
  SlotEnd& end = *state_->ends[local_rank];
  end.Place(call % 2 * half_bytes(), num_slots, aligned);
  return end;
}

void SharedCommunicator::Poison(const std::exception_ptr& reason) {
  state_->Poison(reason);
}

std::exception_ptr SharedCommunicator::poison() const {
  std::lock_guard lock(state_->mutex);
  return state_->failure;
}

void SharedCommunicator::OnPoison(
    std::function<void(const std::exception_ptr&)> callback) {
  std::exception_ptr reason;
  {
    std::lock_guard lock(state_->mutex);
    reason = state_->failure;
    if (!reason) {
      state_->on_poison = std::move(callback);
      return;
    }
  }
  callback(reason);
}

void SharedCommunicator::Close() { state_->Close(); }

}  // namespace jax_ub
