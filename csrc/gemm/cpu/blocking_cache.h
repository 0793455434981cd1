// Caches blockings between calls, because choosing a blocking takes longer than the
// rest of planning a product.
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

// A map from the arguments of ChooseBlocking (sizes, segments along K and whether they
// have their own factors, kernels, number of workers) to its result, how a product is
// divided. The result does not depend on addresses of operands. Thread-safe.
class BlockingCache {
 public:
  // When the cache is full, it is cleared. A program has only a few distinct products.
  static constexpr size_t kMaxEntries = 1024;

  GemmBlocking Get(const GemmProblem& problem,
                   const KernelSet& kernels,
                   int num_workers);

  // For tests: returns the number of cache misses.
  int64_t num_chosen() const { return num_chosen_.load(); }

 private:
  struct Entry {
    int64_t m = 0;
    int64_t n = 0;
    int num_workers = 0;
    const KernelSet* kernels = nullptr;
    std::vector<int64_t> k_bounds_of_a;
    std::vector<int64_t> k_bounds_of_b;
    bool has_factors_by_k = false;
    GemmBlocking blocking;
  };

  std::shared_mutex mutex_;
  std::unordered_map<uint64_t, Entry>
      entries_;  // by hash of the key; guarded by mutex_
  std::atomic<int64_t> num_chosen_{0};
};

}  // namespace jax_ub
