#include "transport/cpu/shared_memory.h"

#include <utility>

#include "platform/error.h"
#include "platform/mapping.h"
#include "transport/cpu/peer_status.h"
#include "transport/cpu/slots.h"
#include "transport/process/group_failure.h"
#include "transport/process/handshake.h"

namespace jax_ub {

struct SharedMemoryCommunicator::State {
  State(ProcessGroup its_group,
        Layout its_layout,
        std::vector<SharedMapping> its_memories,
        std::vector<ConnectedPeer> its_connected_peers);
  ~State();

  void FailWaits(const std::exception_ptr& poison);
  void SetLost(int process, const std::string& how);
  void WakeLocalWaits();

  const ProcessGroup group;
  const Layout layout;
  std::vector<SharedMapping> memories;  // indexed by process
  PeerStatus peer_status;
  GroupControl group_control;
  std::vector<RankMemory> areas;  // indexed by rank
  // The transports of this process's ranks. Indexed by rank; null for ranks of other
  // processes.
  std::vector<std::unique_ptr<SlotTransport>> ends;

  // Declared last, so that it is destroyed first: its thread uses the members above.
  GroupFailure failure;
};

namespace {

SharedMapping NewMemory(const ProcessGroup& group, const Layout& layout) {
  const auto num_own = static_cast<int>(group.ranks_of(group.own()).size());
  try {
    return SharedMapping::Create(layout.size_bytes(num_own));
  } catch (const SystemError& error) {
    throw CommunicatorError(group.ErrorPrefix() + error.what() +
                            ". A smaller shape of initialize_ub needs less");
  }
}

std::vector<PeerStatus::PeerName> MembersOf(
    const ProcessGroup& group, const std::vector<ConnectedPeer>& connected_peers) {
  std::vector<PeerStatus::PeerName> members;
  for (int p = 0; p < group.num_processes(); ++p) {
    members.push_back(
        {group.Describe(p, connected_peers[p].pid), connected_peers[p].seen_pid});
  }
  return members;
}

// Returns a description of the group, the buffer size and the memory layout. In the
// handshake, every process checks that its peers have the same one.
std::string SetupText(const ProcessGroup& group, const Layout& layout) {
  // Must be incremented with every change of the memory layout or the protocol.
  constexpr int kProtocol = 3;
  return group.RanksText() + ", buffers of " + std::to_string(layout.buffer_bytes()) +
         " bytes, protocol " + std::to_string(kProtocol) + "." +
         std::to_string(sizeof(ProcessControlBlock)) + "." +
         std::to_string(sizeof(RankHeader));
}

// Maps the memory whose descriptor a peer has sent in the handshake.
SharedMapping MapOf(const ProcessGroup& group,
                    const Layout& layout,
                    int process_index,
                    const ConnectedPeer& peer,
                    FileDescriptor memory) {
  if (!memory) {
    throw CommunicatorError(
        group.ErrorPrefix() + group.Describe(process_index, peer.pid) +
        " passed no memory: are this process's descriptors used up (ulimit -n)?");
  }
  const auto num_ranks = static_cast<int>(group.ranks_of(process_index).size());
  return SharedMapping::Map(std::move(memory), layout.size_bytes(num_ranks));
}

std::vector<ProcessControlBlock*> HeadersOf(
    const Layout& layout, const std::vector<SharedMapping>& memories) {
  std::vector<ProcessControlBlock*> headers;
  for (const SharedMapping& memory : memories) {
    headers.push_back(layout.header(memory.data()));
  }
  return headers;
}

}  // namespace

SharedMemoryCommunicator::State::State(ProcessGroup its_group,
                                       Layout its_layout,
                                       std::vector<SharedMapping> its_memories,
                                       std::vector<ConnectedPeer> its_connected_peers)
    : group(std::move(its_group)),
      layout(its_layout),
      memories(std::move(its_memories)),
      peer_status(MembersOf(group, its_connected_peers)),
      group_control(HeadersOf(layout, memories), group.own(), peer_status),
      areas(group.num_ranks()),
      ends(group.num_ranks()),
      failure(group,
              {.fail_waits = [this](const auto& poison) { FailWaits(poison); },
               .set_lost = [this](int p, const auto& how) { SetLost(p, how); },
               // Signatures are exchanged through shared memory, so no message needs to
               // be handled.
               .on_signature = {}}) {
  for (int p = 0; p < group.num_processes(); ++p) {
    const std::vector<int>& ranks = group.ranks_of(p);
    for (int n = 0; n < static_cast<int>(ranks.size()); ++n) {
      std::byte* memory = memories[p].data();
      areas[ranks[n]] = {
          .doorbell = &layout.area(memory, n)->doorbell,
          .flags = layout.area(memory, n)->flags,
          .memory = layout.buffers(memory, n),
          .process = p,
          .name = group.DescribeRank(ranks[n], its_connected_peers[p].pid)};
    }
  }
  for (const int rank : group.ranks_of(group.own())) {
    ends[rank] = std::make_unique<SlotTransport>(rank, areas, peer_status, 0);
  }
  failure.Watch(its_connected_peers);
}

SharedMemoryCommunicator::State::~State() {
  failure.Close();
  if (!failure.IsForkedChild()) return;
  for (SharedMapping& memory : memories) memory.Forget();
}

void SharedMemoryCommunicator::State::FailWaits(const std::exception_ptr& poison) {
  peer_status.Poison(poison);
  WakeLocalWaits();
}

void SharedMemoryCommunicator::State::SetLost(int process, const std::string& how) {
  peer_status.SetLost(process, how);
  WakeLocalWaits();
}

void SharedMemoryCommunicator::State::WakeLocalWaits() {
  group_control.WakeLocalWaits();
  for (const int rank : group.ranks_of(group.own())) Ring(*areas[rank].doorbell);
}

std::shared_ptr<SharedMemoryCommunicator> SharedMemoryCommunicator::Connect(
    std::unique_ptr<Endpoint> endpoint,
    GroupMembership membership,
    const std::map<int, PeerAddress>& peers,
    int64_t buffer_bytes,
    double timeout_s) {
  ProcessGroup group(membership);
  const Layout layout(buffer_bytes);
  group.CheckAddresses(peers);
  std::vector<SharedMapping> memories(group.num_processes());
  SharedMapping& own = memories[group.own()];
  own = NewMemory(group, layout);
  Handshake handshake(
      *endpoint, group, peers, SetupText(group, layout), own.descriptor(),
      [&](int process_index, const ConnectedPeer& peer, FileDescriptor memory) {
        memories[process_index] =
            MapOf(group, layout, process_index, peer, std::move(memory));
      });
  std::vector<ConnectedPeer> connected_peers = handshake.Run(timeout_s);
  own.CloseDescriptor();
  return std::shared_ptr<SharedMemoryCommunicator>(
      new SharedMemoryCommunicator(std::make_unique<State>(
          std::move(group), layout, std::move(memories), std::move(connected_peers))));
}

SharedMemoryCommunicator::SharedMemoryCommunicator(std::unique_ptr<State> state)
    : state_(std::move(state)) {}

SharedMemoryCommunicator::~SharedMemoryCommunicator() = default;

const std::string& SharedMemoryCommunicator::name() const {
  return state_->group.name();
}
int SharedMemoryCommunicator::num_ranks() const { return state_->group.num_ranks(); }
const std::vector<int>& SharedMemoryCommunicator::local_ranks() const {
  return state_->group.ranks_of(process());
}
const std::vector<int>& SharedMemoryCommunicator::processes() const {
  return state_->group.process_ids();
}
int SharedMemoryCommunicator::num_processes() const {
  return state_->group.num_processes();
}
int SharedMemoryCommunicator::process() const { return state_->group.own(); }
int SharedMemoryCommunicator::process_of_rank(int rank) const {
  return state_->group.process_index_of_rank(rank);
}
bool SharedMemoryCommunicator::is_leader() const { return process() == 0; }
std::string SharedMemoryCommunicator::DescribeProcess(int process) const {
  return state_->peer_status.name(process);
}

std::byte* SharedMemoryCommunicator::buffer(int rank, int64_t call) const {
  return state_->areas[rank].memory + call % 2 * buffer_bytes();
}
int64_t SharedMemoryCommunicator::buffer_bytes() const {
  return state_->layout.buffer_bytes();
}
int64_t SharedMemoryCommunicator::size_bytes() const {
  return state_->memories[process()].size_bytes();
}

void SharedMemoryCommunicator::AppendToCallLog(const CallLogEntry& entry) {
  state_->group_control.AppendToCallLog(entry);
}
CallLogEntry SharedMemoryCommunicator::WaitForLogEntry(int64_t call,
                                                       const WaitReason& reason) {
  return state_->group_control.WaitForLogEntry(call, reason);
}
void SharedMemoryCommunicator::PublishSignature(int64_t call,
                                                uint64_t signature,
                                                std::string_view text) {
  state_->group_control.PublishSignature(call, signature, text);
}
CallSignature SharedMemoryCommunicator::call_signature(int process,
                                                       int64_t call) const {
  return state_->group_control.call_signature(process, call);
}
void SharedMemoryCommunicator::Barrier(int64_t call,
                                       int phase,
                                       const WaitReason& reason) {
  state_->group_control.Barrier(call, phase, reason);
}

Transport& SharedMemoryCommunicator::rank(int local_rank,
                                          int64_t call,
                                          int num_slots,
                                          int64_t slot_bytes) {
  const int64_t stride = SlotTransport::StrideOf(slot_bytes);
  if (num_slots > kMaxSlots || num_slots * stride > buffer_bytes()) {
    throw UnsupportedError(
        "jax_ub." + name() + ": " + std::to_string(num_slots) + " slots of " +
        std::to_string(slot_bytes) + " bytes do not fit into a buffer of " +
        std::to_string(buffer_bytes()) + " bytes with " + std::to_string(kMaxSlots) +
        " flags: give initialize_ub a larger shape, or the name fewer num_splits");
  }
  SlotTransport& end = *state_->ends[local_rank];
  end.SetLayout(call % 2 * buffer_bytes(), num_slots, stride);
  return end;
}

void SharedMemoryCommunicator::Poison(const std::exception_ptr& reason) {
  state_->failure.Poison(reason);
}

std::exception_ptr SharedMemoryCommunicator::poison() const {
  return state_->failure.reason();
}

void SharedMemoryCommunicator::OnPoison(
    std::function<void(const std::exception_ptr&)> callback) {
  state_->failure.OnReason(std::move(callback));
}

void SharedMemoryCommunicator::Close() { state_->failure.Close(); }

}  // namespace jax_ub
