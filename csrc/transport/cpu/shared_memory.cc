#include "transport/cpu/shared_memory.h"

#include <utility>

#include "platform/error.h"
#include "platform/shared_mapping.h"
#include "transport/cpu/fate.h"
#include "transport/cpu/slots.h"
#include "transport/process/group_failure.h"
#include "transport/process/handshake.h"

namespace jax_ub {

struct SharedCommunicator::State {
  State(Group its_group,
        Layout its_layout,
        std::vector<SharedMapping> its_memories,
        std::vector<Partner> its_partners);
  ~State();

  void EndWaits(const std::exception_ptr& poison);
  void SetGone(int process, const std::string& how);
  void WakeOwn();

  const Group group;
  const Layout layout;
  std::vector<SharedMapping> memories;  // [process]
  Fate fate;
  Lockstep lockstep;
  std::vector<RankArea> areas;                 // [rank]
  std::vector<std::unique_ptr<SlotEnd>> ends;  // [rank]; none of other processes

  GroupFailure failure;  // the last: its thread uses what is above
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
    members.push_back({group.Describe(p, partners[p].pid), partners[p].seen_pid});
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
      ends(group.num_ranks()),
      failure(group,
              {.end_waits = [this](const auto& poison) { EndWaits(poison); },
               .set_gone = [this](int p, const auto& how) { SetGone(p, how); },
               .hear_statement = {}}) {  // a call is announced in shared memory
  for (int p = 0; p < group.num_processes(); ++p) {
    const std::vector<int>& ranks = group.ranks_of(p);
    for (int n = 0; n < static_cast<int>(ranks.size()); ++n) {
      std::byte* memory = memories[p].data();
      areas[ranks[n]] = {.doorbell = &layout.area(memory, n)->doorbell,
                         .flags = layout.area(memory, n)->flags,
                         .memory = layout.halves(memory, n),
                         .process = p,
                         .name = group.DescribeRank(ranks[n], its_partners[p].pid)};
    }
  }
  for (const int rank : group.ranks_of(group.own())) {
    ends[rank] = std::make_unique<SlotEnd>(rank, areas, fate, 0);
  }
  failure.Watch(its_partners);
}

SharedCommunicator::State::~State() {
  failure.Close();
  if (!failure.IsCopy()) return;
  for (SharedMapping& memory : memories) memory.Forget();
}

void SharedCommunicator::State::EndWaits(const std::exception_ptr& poison) {
  fate.Poison(poison);
  WakeOwn();
}

void SharedCommunicator::State::SetGone(int process, const std::string& how) {
  fate.SetGone(process, how);
  WakeOwn();
}

void SharedCommunicator::State::WakeOwn() {
  lockstep.WakeOwn();
  for (const int rank : group.ranks_of(group.own())) Ring(*areas[rank].doorbell);
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
  const int64_t stride = SlotEnd::StrideOf(slot_bytes);
  if (num_slots > kMaxSlots || num_slots * stride > half_bytes()) {
    throw UnsupportedError(
        "jax_ub." + name() + ": " + std::to_string(num_slots) + " slots of " +
        std::to_string(slot_bytes) + " bytes do not fit into a half of " +
        std::to_string(half_bytes()) + " bytes with " + std::to_string(kMaxSlots) +
        " flags: give initialize_ub a larger shape, or the name fewer num_splits");
  }
  SlotEnd& end = *state_->ends[local_rank];
  end.Place(call % 2 * half_bytes(), num_slots, stride);
  return end;
}

void SharedCommunicator::Poison(const std::exception_ptr& reason) {
  state_->failure.Poison(reason);
}

std::exception_ptr SharedCommunicator::poison() const {
  return state_->failure.reason();
}

void SharedCommunicator::OnPoison(
    std::function<void(const std::exception_ptr&)> callback) {
  state_->failure.OnReason(std::move(callback));
}

void SharedCommunicator::Close() { state_->failure.Close(); }

}  // namespace jax_ub
