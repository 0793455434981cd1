// The ranks and processes of a multi-process communicator.
#pragma once

#include <sys/types.h>

#include <cstdint>
#include <map>
#include <string>
#include <vector>

namespace jax_ub {

// States which processes own the ranks of a tensor-parallel group. Process numbers are
// JAX's process indices, and need not be contiguous.
struct GroupMembership {
  std::vector<int> process_of_rank;  // the process number; indexed by rank
  int process = 0;                   // the number of this process
  std::string name;                  // the communicator's name, for error messages
};

// The name of a process's listening socket, and the token that a process must send when
// it connects.
struct PeerAddress {
  std::string address;
  uint64_t token = 0;
};

// The processes of a group. A process is identified by its *process index*: the
// processes are numbered from 0 (the leader) in the order of the lowest rank of each
// process.
class ProcessGroup {
 public:
  // Throws std::invalid_argument if no rank of the group is in this process.
  explicit ProcessGroup(const GroupMembership& membership);

  const std::string& name() const { return name_; }
  int num_ranks() const { return static_cast<int>(process_index_of_rank_.size()); }
  int num_processes() const { return static_cast<int>(process_ids_.size()); }
  int own() const { return own_; }
  // Returns JAX's index of each process of the group. The vector is indexed by the
  // process index within the group.
  const std::vector<int>& process_ids() const { return process_ids_; }
  int process_index_of_rank(int rank) const { return process_index_of_rank_[rank]; }
  const std::vector<int>& ranks_of(int process_index) const {
    return ranks_[process_index];
  }

  // Returns a text such as "ranks 2, 3 (process 1, pid 123)", without the pid if it is
  // 0.
  std::string Describe(int process_index, pid_t pid) const;
  // Returns a text such as "rank 2 (process 1, pid 123)", without the pid if it is 0.
  std::string DescribeRank(int rank, pid_t pid) const;
  // Returns a text such as "'tp' with ranks of processes 0, 0, 1".
  std::string RanksText() const;
  // Throws CommunicatorError unless `peers` has the addresses of all other processes.
  void CheckAddresses(const std::map<int, PeerAddress>& peers) const;
  // Returns "CommunicatorError: jax_ub.<name>: ", with which all error messages of the
  // group begin.
  std::string ErrorPrefix() const;

 private:
  std::string name_;
  std::vector<int> process_ids_;            // process numbers; indexed by process index
  std::vector<int> process_index_of_rank_;  // indexed by rank
  std::vector<std::vector<int>> ranks_;     // indexed by process index
  int own_ = -1;                            // the index of this process
};

}  // namespace jax_ub
