#include "gemm/cpu/blocking_cache.h"

#include <mutex>
#include <utility>

namespace jax_ub {

namespace {

// A 64-bit FNV-1a hash of integers. It also mixes high bits into low bits.
class Hash {
 public:
  void Add(uint64_t value) {
    value_ = (value_ ^ value) * 0x100000001b3u;
    value_ ^= value_ >> 32;
  }
  void Add(const std::vector<int64_t>& values) {
    Add(values.size());
    for (const int64_t value : values) Add(static_cast<uint64_t>(value));
  }
  uint64_t value() const { return value_; }

 private:
  uint64_t value_ = 0xcbf29ce484222325u;
};

}  // namespace

GemmBlocking BlockingCache::Get(const GemmProblem& problem,
                                const KernelSet& kernels,
                                int num_workers) {
  Hash hash;
  hash.Add(static_cast<uint64_t>(problem.m));
  hash.Add(static_cast<uint64_t>(problem.n));
  hash.Add(static_cast<uint64_t>(num_workers));
  hash.Add(reinterpret_cast<uintptr_t>(&kernels));
  hash.Add(problem.a.inner_bounds);
  hash.Add(problem.b.inner_bounds);
  hash.Add(static_cast<uint64_t>(problem.has_factors_by_k));
  {
    std::shared_lock lock(mutex_);
    const auto found = entries_.find(hash.value());
    if (found != entries_.end()) {
      const Entry& entry = found->second;
      if (entry.m == problem.m && entry.n == problem.n &&
          entry.num_workers == num_workers && entry.kernels == &kernels &&
          entry.has_factors_by_k == problem.has_factors_by_k &&
          entry.k_bounds_of_a == problem.a.inner_bounds &&
          entry.k_bounds_of_b == problem.b.inner_bounds) {
        return entry.blocking;
      }
    }
  }
  ++num_chosen_;
  Entry entry{problem.m,
              problem.n,
              num_workers,
              &kernels,
              problem.a.inner_bounds,
              problem.b.inner_bounds,
              problem.has_factors_by_k,
              ChooseBlocking(problem, kernels, num_workers)};
  GemmBlocking blocking = entry.blocking;
  std::lock_guard lock(mutex_);
  if (entries_.size() == kMaxEntries) entries_.clear();
  entries_.insert_or_assign(hash.value(), std::move(entry));
  return blocking;
}

}  // namespace jax_ub
