// A test process of a group that spans several processes, with GPUs and a communicator.
#pragma once

#include <algorithm>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <vector>

#include "cuda/address_exchange.h"
#include "cuda/cuda_calls.h"
#include "processes.h"

namespace jax_ub {

// A test process with a group's communicator. Rank r is on device r; the n-th local
// rank has ordinal n.
class GpuMember {
 public:
  GpuMember(int process,
            AddressExchange& addresses,
            const Side& side,
            const EmulatedOptions& options)
      : process_(process), gpus_(options) {
    const std::vector<int>& of_rank = side.process_of_rank;
    const int num_ranks = static_cast<int>(of_rank.size());
    std::map<int, int64_t> local_devices;
    for (int rank = 0; rank < num_ranks; ++rank) {
      const bool is_local = of_rank[rank] == process;
      const int ordinal = static_cast<int>(placement_.local_ranks.size());
      placement_.ordinals.push_back(is_local ? ordinal : 0);
      placement_.ranks.push_back(rank);
      if (!is_local) continue;
      placement_.local_ranks.push_back(rank);
      local_devices[ordinal] = rank;
    }
    gpus_.engine().set_nvls(side.nvls);
    gpus_.engine().set_local_devices(local_devices);
    communicator_ = ConnectOn(process, addresses, side);
    gpus_.engine().Join(communicator_, placement_.ranks);
  }
  ~GpuMember() { gpus_.engine().Leave(communicator_); }
  GpuMember(const GpuMember&) = delete;
  GpuMember& operator=(const GpuMember&) = delete;

  int process() const { return process_; }
  Gpus& gpus() { return gpus_; }
  // Returns the placement of a call of all ranks.
  const Placement& placement() const { return placement_; }

 private:
  const int process_;
  Gpus gpus_;
  Placement placement_;
  std::shared_ptr<CudaCommunicator> communicator_;
};

// Runs `function` in every process, each with its own emulated GPUs and random delays.
inline Processes RunOnGpus(AddressExchange& addresses,
                           const Side& side,
                           const EmulatedOptions& options,
                           const std::function<void(GpuMember&)>& function) {
  const std::vector<int>& of_rank = side.process_of_rank;
  const int num_processes = *std::max_element(of_rank.begin(), of_rank.end()) + 1;
  return Processes(num_processes, [&](int process) {
    EmulatedOptions own = options;
    own.num_devices =
        static_cast<int>(std::count(of_rank.begin(), of_rank.end(), process));
    own.first_device = static_cast<int>(std::count_if(
        of_rank.begin(), of_rank.end(), [&](int p) { return p < process; }));
    own.seed += process;
    GpuMember member(process, addresses, side, own);
    function(member);
  });
}

}  // namespace jax_ub
