// Divides a product into work units, and units into blocks that fit the caches.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <map>
#include <shared_mutex>
#include <tuple>
#include <vector>

#include "gemm/cpu/kernels.h"
#include "gemm/gemm.h"

namespace jax_ub {

// How a product is divided. Sizes are in elements. A unit computes unit_rows x
// unit_columns elements of C, block by block along K; block i is [k_bounds[i],
// k_bounds[i + 1]). For each block of K, it multiplies block_rows rows of A with all
// panels of B, tile by tile.
struct GemmBlocking {
  int64_t unit_rows = 0;
  int64_t unit_columns = 0;
  std::vector<int64_t> k_bounds;
  int64_t k_block = 0;  // length of the longest block of K
  int64_t block_rows = 0;

  int64_t num_k_blocks() const { return static_cast<int64_t>(k_bounds.size()) - 1; }
  bool operator==(const GemmBlocking&) const = default;
};

// Chooses how to divide a product. The choice depends on the sizes of the product, the
// segments along K, the dtype and the layout of B, the kernels and the number of
// workers.
GemmBlocking ChooseBlocking(const GemmProblem& problem,
                            const KernelSet& kernels,
                            int num_workers);

// Caches the results of ChooseBlocking between calls, because choosing a blocking takes
// longer than the rest of planning a product. Thread-safe.
class BlockingCache {
 public:
  // Maximum number of entries of the cache, which is cleared when it is full. A program
  // has only a few distinct products.
  static constexpr size_t kMaxEntries = 1024;

  GemmBlocking Get(const GemmProblem& problem,
                   const KernelSet& kernels,
                   int num_workers);

  // For tests: returns the number of cache misses.
  int64_t num_chosen() const { return num_chosen_.load(); }

 private:
  // A key has everything on which a blocking depends. In order: M, N, whether the product
  // of each segment along K has its own scale factor, the dtype of B, whether B is
  // contiguous along K, the kernels, the number of workers, and the positions along K
  // where the segments of A and of B end.
  using Key = std::tuple<int64_t,
                         int64_t,
                         bool,
                         DType,
                         bool,
                         const KernelSet*,
                         int,
                         std::vector<int64_t>,
                         std::vector<int64_t>>;

  std::shared_mutex mutex_;
  // Guarded by mutex_. With std::less<>, a lookup takes a tuple of references, so it
  // copies no vectors.
  std::map<Key, GemmBlocking, std::less<>> entries_;
  std::atomic<int64_t> num_chosen_{0};
};

// Estimates the time of a product on one thread with the given kernels, in
// microseconds. EstimateGemmUs calls this with the kernels of the current instruction
// set.
double EstimateCpuGemmUs(const GemmProblem& problem, const KernelSet& kernels);

}  // namespace jax_ub
