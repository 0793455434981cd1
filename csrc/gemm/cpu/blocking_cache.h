// How products were cut into units and blocks, kept from call to call: to choose a
// blocking takes longer than all else that a plan needs.
#pragma once

#include <atomic>
#include <cstdint>
#include <shared_mutex>
#include <unordered_map>
#include <vector>

#include "gemm/cpu/kernels.h"
#include "gemm/cpu/plan.h"
#include "gemm/gemm.h"

namespace jax_ub {

// Blockings by what ChooseBlocking reads: sizes, bounds along K, kernels, number of
// workers. No address is part of the key or of the value. Thread-safe.
class BlockingCache {
 public:
  // Programs have a few products each; a cache that is full starts anew.
  static constexpr size_t kMaxEntries = 1024;

  GemmBlocking Get(const GemmProblem& problem,
                   const KernelSet& kernels,
                   int num_workers);

  // How many blockings were chosen, for tests.
  int64_t num_chosen() const { return num_chosen_.load(); }

 private:
  struct Entry {
    int64_t m = 0;
    int64_t n = 0;
    int num_workers = 0;
    const KernelSet* kernels = nullptr;
    std::vector<int64_t> k_bounds_of_a;
    std::vector<int64_t> k_bounds_of_b;
    GemmBlocking blocking;
  };

  std::shared_mutex mutex_;
  std::unordered_map<uint64_t, Entry> entries_;  // by the key's hash; guarded by mutex_
  std::atomic<int64_t> num_chosen_{0};
};

}  // namespace jax_ub
