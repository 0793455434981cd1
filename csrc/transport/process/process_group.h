// The ranks and processes of a multi-process communicator.
#pragma once

#include <sys/types.h>

#include <cstdint>
#include <map>
#include <string>
#include <vector>

namespace jax_ub {

// The processes that own the ranks of one tensor-parallel group. Process numbers are
// those of JAX and need not be contiguous.
struct GroupMembership {
  std::vector<int> process_of_rank;  // the process number; indexed by rank
  int process = 0;                   // the number of this process
  std::string name;                  // the communicator's name, for error messages
};

// The name of a process's listening socket, and the token that a connecting process
// must send.
struct PeerAddress {
  std::string address;
  uint64_t token = 0;
};

// A group whose processes are identified by their *process index* (`process_index` in
// the code): processes are ordered by their lowest rank, and index 0 is the leader.
class ProcessGroup {
 public:
  // Throws std::invalid_argument if this process has no rank in the group.
  explicit ProcessGroup(const GroupMembership& membership);

  const std::string& name() const { return name_; }
  int num_ranks() const { return static_cast<int>(process_index_of_rank_.size()); }
  int num_processes() const { return static_cast<int>(process_ids_.size()); }
  int own() const { return own_; }
  // Returns the process numbers, indexed by process index.
  const std::vector<int>& process_ids() const { return process_ids_; }
  int process_index_of_rank(int rank) const { return process_index_of_rank_[rank]; }
  const std::vector<int>& ranks_of(int process_index) const {
    return ranks_[process_index];
  }

  // Describes a process with all its ranks: "ranks 2, 3 (process 1, pid 123)". Omits
  // the pid if it is 0.
  std::string Describe(int process_index, pid_t pid) const;
  // Describes one rank: "rank 2 (process 1, pid 123)". Omits the pid if it is 0.
  std::string DescribeRank(int rank, pid_t pid) const;
  // Returns, for example, "'tp' with ranks of processes 0, 0, 1".
  std::string RanksText() const;
  // Throws CommunicatorError unless `peers` has an address of every other process.
  void CheckAddresses(const std::map<int, PeerAddress>& peers) const;
  // Returns the start of every error message: "CommunicatorError: jax_ub.<name>: ".
  std::string ErrorPrefix() const;

 private:
  std::string name_;
  std::vector<int> process_ids_;            // process numbers; indexed by process index
  std::vector<int> process_index_of_rank_;  // indexed by rank
  std::vector<std::vector<int>> ranks_;     // indexed by process index
  int own_ = -1;                            // the index of this process
};

}  // namespace jax_ub
