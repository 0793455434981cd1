#include "engine/cpu/peak.h"

#include <numeric>
#include <stdexcept>
#include <string>
#include <vector>

#include "gemm/cpu/isa.h"
#include "gemm/cpu/peak.h"

namespace jax_ub {

double MeasurePeak(ThreadPool& pool, DType dtype, double duration_s) {
  if (!(duration_s > 0 && duration_s <= 60)) {
    throw std::invalid_argument("peak: duration_s is " + std::to_string(duration_s) +
                                ", expected more than 0 and at most 60");
  }
  const KernelSet& kernels = KernelsFor(IsaInUse(), dtype, dtype);
  const int num_workers = pool.num_workers();
  std::vector<double> rates(num_workers);  // of one unit per thread
  pool.ParallelFor(num_workers, [&](int64_t unit, Scratch& scratch) {
    rates[unit] = MeasureTiles(kernels, duration_s, scratch);
  });
  return std::accumulate(rates.begin(), rates.end(), 0.0);
}

}  // namespace jax_ub
