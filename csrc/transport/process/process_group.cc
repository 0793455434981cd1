#include "transport/process/process_group.h"

#include <algorithm>
#include <stdexcept>

#include "platform/error.h"

namespace jax_ub {

namespace {

std::string ProcessText(int number, pid_t pid) {
  std::string text = " (process " + std::to_string(number);
  if (pid != 0) text += ", pid " + std::to_string(pid);
  return text + ")";
}

}  // namespace

ProcessGroup::ProcessGroup(const GroupMembership& membership) : name_(membership.name) {
  for (size_t rank = 0; rank < membership.process_of_rank.size(); ++rank) {
    const int number = membership.process_of_rank[rank];
    const auto found = std::find(process_ids_.begin(), process_ids_.end(), number);
    const auto process_index = static_cast<int>(found - process_ids_.begin());
    if (found == process_ids_.end()) {
      process_ids_.push_back(number);
      ranks_.emplace_back();
      if (number == membership.process) own_ = process_index;
    }
    process_index_of_rank_.push_back(process_index);
    ranks_[process_index].push_back(static_cast<int>(rank));
  }
  if (own_ < 0) {
    throw std::invalid_argument("jax_ub." + name_ + ": process " +
                                std::to_string(membership.process) +
                                " has no rank in this group");
  }
}

std::string ProcessGroup::Describe(int process_index, pid_t pid) const {
  const std::vector<int>& ranks = ranks_[process_index];
  std::string text = ranks.size() == 1 ? "rank " : "ranks ";
  for (size_t i = 0; i < ranks.size(); ++i) {
    text += (i == 0 ? "" : ", ") + std::to_string(ranks[i]);
  }
  return text + ProcessText(process_ids_[process_index], pid);
}

std::string ProcessGroup::DescribeRank(int rank, pid_t pid) const {
  return "rank " + std::to_string(rank) +
         ProcessText(process_ids_[process_index_of_rank_[rank]], pid);
}

std::string ProcessGroup::RanksText() const {
  std::string text = "'" + name_ + "' with ranks of processes";
  for (int rank = 0; rank < num_ranks(); ++rank) {
    text += (rank == 0 ? " " : ", ") +
            std::to_string(process_ids_[process_index_of_rank_[rank]]);
  }
  return text;
}

void ProcessGroup::CheckAddresses(const std::map<int, PeerAddress>& peers) const {
  for (int process_index = 0; process_index < num_processes(); ++process_index) {
    if (process_index != own_ && peers.count(process_ids_[process_index]) == 0) {
      throw CommunicatorError(ErrorPrefix() + "no address of " +
                              Describe(process_index, 0) + " was given");
    }
  }
}

std::string ProcessGroup::ErrorPrefix() const {
  return "CommunicatorError: jax_ub." + name_ + ": ";
}

}  // namespace jax_ub
