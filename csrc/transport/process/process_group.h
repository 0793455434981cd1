// Who belongs to a communicator between processes.
#pragma once

#include <sys/types.h>

#include <cstdint>
#include <map>
#include <string>
#include <vector>

namespace jax_ub {

// The ranks of one tensor-parallel group. Processes have any numbers, as in jax; where
// the order matters (the leader, sums), it is that of each one's lowest rank.
struct GroupMembership {
  std::vector<int> process_of_rank;  // [rank]
  int process = 0;                   // the own one
  std::string name;                  // of the communicator, for messages
};

// Where a process listens, and what it wants to hear.
struct PeerAddress {
  std::string address;
  uint64_t token = 0;
};

// The same with processes by their place in that order.
class ProcessGroup {
 public:
  // Throws std::invalid_argument when the own process has no rank.
  explicit ProcessGroup(const GroupMembership& membership);

  const std::string& name() const { return name_; }
  int num_ranks() const { return static_cast<int>(process_index_of_rank_.size()); }
  int num_processes() const { return static_cast<int>(process_ids_.size()); }
  int own() const { return own_; }
  const std::vector<int>& process_ids() const { return process_ids_; }  // [place]
  int process_index_of_rank(int rank) const { return process_index_of_rank_[rank]; }
  const std::vector<int>& ranks_of(int place) const { return ranks_[place]; }

  // "rank 2 (process 1, pid 123)"; without the pid where it is 0.
  std::string Describe(int place, pid_t pid) const;
  // The same of one rank.
  std::string DescribeRank(int rank, pid_t pid) const;
  // "'tp' with ranks of processes 0, 0, 1".
  std::string RanksText() const;
  // Throws CommunicatorError unless each other process has an address.
  void CheckAddresses(const std::map<int, PeerAddress>& peers) const;
  // Begins every error: "CommunicatorError: jax_ub.<name>: ".
  std::string ErrorPrefix() const;

 private:
  std::string name_;
  std::vector<int> process_ids_;            // [place]: the process's own number
  std::vector<int> process_index_of_rank_;  // [rank]
  std::vector<std::vector<int>> ranks_;     // [place]
  int own_ = -1;
};

}  // namespace jax_ub
