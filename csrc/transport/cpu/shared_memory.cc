#include "transport/cpu/shared_memory.h"

#include <utility>

#include "platform/error.h"

namespace jax_ub {

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

std::vector<PeerStatus::PeerName> PeerNamesOf(
    const ProcessGroup& group, const std::vector<ConnectedPeer>& connected_peers) {
  std::vector<PeerStatus::PeerName> members;
  for (int p = 0; p < group.num_processes(); ++p) {
    members.push_back(
        {group.Describe(p, connected_peers[p].pid), connected_peers[p].seen_pid});
  }
  return members;
}

// Returns a description of the group, the buffer size and the memory layout. In the
// handshake, every process checks that all processes have the same description.
std::string SetupText(const ProcessGroup& group, const Layout& layout) {
  // Version of the memory layout and the protocol. Must be incremented with every
  // change.
  constexpr int kProtocol = 3;
  return group.RanksText() + ", buffers of " + std::to_string(layout.buffer_bytes()) +
         " bytes, protocol " + std::to_string(kProtocol) + "." +
         std::to_string(sizeof(ProcessControlBlock)) + "." +
         std::to_string(sizeof(RankHeader));
}

// Maps the memory of a peer. `memory` is the file descriptor that the peer has sent in
// the handshake.
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

SharedMemoryCommunicator::SharedMemoryCommunicator(
    ProcessGroup group,
    const Layout& layout,
    std::vector<SharedMapping> memories,
    std::vector<ConnectedPeer> connected_peers)
    : group_(std::move(group)),
      layout_(layout),
      memories_(std::move(memories)),
      peer_status_(PeerNamesOf(group_, connected_peers)),
      group_control_(HeadersOf(layout_, memories_), group_.own(), peer_status_),
      areas_(group_.num_ranks()),
      ends_(group_.num_ranks()),
      failure_(group_,
               {.fail_waits =
                    [this](const auto& poison) {
                      peer_status_.Poison(poison);
                      WakeLocalWaits();
                    },
                .set_lost =
                    [this](int lost, const auto& how) {
                      peer_status_.SetLost(lost, how);
                      WakeLocalWaits();
                    },
                // Signatures are exchanged through shared memory, so no message needs
                // to be handled.
                .on_signature = {}}) {
  for (int p = 0; p < group_.num_processes(); ++p) {
    const std::vector<int>& ranks = group_.ranks_of(p);
    for (int n = 0; n < static_cast<int>(ranks.size()); ++n) {
      std::byte* memory = memories_[p].data();
      areas_[ranks[n]] = {
          .doorbell = &layout_.area(memory, n)->doorbell,
          .flags = layout_.area(memory, n)->flags,
          .memory = layout_.buffers(memory, n),
          .process = p,
          .name = group_.DescribeRank(ranks[n], connected_peers[p].pid)};
    }
  }
  for (const int rank : local_ranks()) {
    ends_[rank] = std::make_unique<SlotTransport>(rank, areas_, peer_status_, 0);
  }
  failure_.Watch(connected_peers);
}

SharedMemoryCommunicator::~SharedMemoryCommunicator() {
  Close();
  if (!failure_.IsForkedChild()) return;
  for (SharedMapping& memory : memories_) memory.DetachAfterFork();
}

void SharedMemoryCommunicator::WakeLocalWaits() {
  group_control_.WakeLocalWaits();
  for (const int rank : local_ranks()) Ring(*areas_[rank].doorbell);
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
  return std::shared_ptr<SharedMemoryCommunicator>(new SharedMemoryCommunicator(
      std::move(group), layout, std::move(memories), std::move(connected_peers)));
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
  SlotTransport& end = *ends_[local_rank];
  end.SetLayout(call % 2 * buffer_bytes(), num_slots, stride);
  return end;
}

}  // namespace jax_ub
