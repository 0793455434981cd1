// Tests the measured peak rate of the kernels, for every instruction set, dtype and
// number of threads.
#include "engine/cpu/peak.h"

#include <limits>

#include "check.h"
#include "gemm/gemm.h"

namespace jax_ub {
namespace {

constexpr double kDurationS = 1e-3;

// Thread pools are never destroyed.
ThreadPool& NewPool(int num_threads) {
  static auto& pools = *new std::vector<ThreadPool*>;
  return *pools.emplace_back(new ThreadPool(num_threads));
}

TEST(EveryInstructionSetHasAPeakForEveryDtype) {
  ThreadPool& pool = NewPool(2);
  const std::string_view in_use = CurrentIsa();
  for (std::string_view isa : AvailableIsas()) {
    SetIsa(isa);
    for (DType dtype : {DType::kF32, DType::kBF16, DType::kF16}) {
      const double peak = MeasurePeak(pool, dtype, kDurationS);
      CHECK(std::isfinite(peak) && peak > 0);
    }
  }
  SetIsa(in_use);
}

TEST(ATimeTooShortForOneTileHasAPeak) {
  for (int num_threads : {1, 3, 16}) {
    const double peak = MeasurePeak(NewPool(num_threads), DType::kF32, 1e-12);
    CHECK(std::isfinite(peak) && peak > 0);
  }
}

TEST(DurationsThatAreNoneAreRefused) {
  ThreadPool& pool = NewPool(1);
  CHECK_THROWS(MeasurePeak(pool, DType::kF32, 0), "duration_s is 0.000000, expected");
  CHECK_THROWS(MeasurePeak(pool, DType::kF32, -1), "duration_s is -1.000000, expected");
  CHECK_THROWS(MeasurePeak(pool, DType::kF32, 61), "more than 0 and at most 60");
  for (double duration_s : {std::numeric_limits<double>::quiet_NaN(),
                            std::numeric_limits<double>::infinity()}) {
    CHECK_THROWS(MeasurePeak(pool, DType::kF32, duration_s), "at most 60");
  }
}

}  // namespace
}  // namespace jax_ub

CHECK_MAIN()
