#include "engine/cpu/peak.h"

#include <memory>
#include <numeric>
#include <stdexcept>
#include <string>
#include <vector>

#include "gemm/cpu/isa.h"
#include "gemm/cpu/peak.h"

namespace jax_ub {

namespace {

// Measures the rate of each thread, one unit per thread.
class PeakJob : public WaitedJob {
 public:
  PeakJob(const KernelSet& kernels, int num_threads, double duration_s)
      : kernels_(kernels), duration_s_(duration_s), rates_(num_threads) {}

  int64_t num_units() const override { return static_cast<int64_t>(rates_.size()); }
  void Run(int64_t unit, Scratch& scratch) override {
    rates_[unit] = MeasureTiles(kernels_, duration_s_, scratch);
  }
  double MeanRate() const {
    return std::accumulate(rates_.begin(), rates_.end(), 0.0) / rates_.size();
  }

 private:
  const KernelSet& kernels_;
  const double duration_s_;
  std::vector<double> rates_;  // [unit]
};

}  // namespace

double MeasurePeak(ThreadPool& pool, DType dtype, double duration_s) {
  if (!(duration_s > 0 && duration_s <= 60)) {
    throw std::invalid_argument("peak: duration_s is " + std::to_string(duration_s) +
                                ", expected more than 0 and at most 60");
  }
  const KernelSet& kernels = KernelsFor(IsaInUse(), dtype, dtype);
  const int num_workers = pool.num_workers();
  const auto job = std::make_shared<PeakJob>(kernels, num_workers, duration_s);
  pool.RunAndWait(job);
  return job->MeanRate() * num_workers;
}

}  // namespace jax_ub
