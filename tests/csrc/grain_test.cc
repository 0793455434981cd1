// Tests that the number of units and workers of a GEMM follows from its estimated time.
#include <limits>
#include <string_view>

#include "check.h"
#include "engine/cpu/thread_pool.h"
#include "engine/cpu/work_list.h"
#include "gemm/cpu/plan.h"

namespace jax_ub {
namespace {

// The plan of a product C = A B. It is never run, so its memory is not read.
class Product {
 public:
  Product(int64_t m, int64_t k, int64_t n, DType dtype = DType::kF32) {
    std::byte* const memory = Memory();
    problem_.m = m;
    problem_.n = n;
    problem_.k = k;
    problem_.a = {dtype, {0, m}, {0, k}, {{memory, k, 1}}};
    problem_.b = {dtype, {0, n}, {0, k}, {{memory, 1, n}}};
    problem_.c = {dtype, 1, {0, m}, {0, n}, {{memory, n}}};
  }

  const GemmProblem& problem() const { return problem_; }

  int64_t NumUnits(int num_workers) const {
    WorkList work;
    work.Add(problem_, num_workers);
    return work.num_units();
  }

 private:
  // Returns a non-null address, since plans check for it.
  static std::byte* Memory() {
    static std::byte memory[64];
    return memory;
  }

  GemmProblem problem_;
};

// Runs a test with the portable kernels, which every machine supports.
class Portable {
 public:
  Portable() : before_(CurrentIsa()) { SetIsa("portable"); }
  ~Portable() { SetIsa(before_); }

 private:
  const std::string_view before_;
};

TEST(AProductBelowTheInlineLimitIsOneUnit) {
  const Portable portable;
  for (const Product& product :
       {Product(16, 64, 64), Product(64, 128, 64), Product(2, 128, 512)}) {
    CHECK(EstimateGemmUs(product.problem()) < kMaxInlineUs);
    for (int num_workers : {1, 2, 64}) CHECK_EQ(product.NumUnits(num_workers), 1);
  }
}

TEST(AProductOfMediumSizeIsDividedByItsEstimatedTime) {
  const Portable portable;
  const Product product(64, 512, 64);
  const int num_workers = WorkersFor(EstimateGemmUs(product.problem()));
  CHECK(num_workers > 2 && num_workers < 16);
  CHECK_EQ(product.NumUnits(64), product.NumUnits(num_workers));
  CHECK(product.NumUnits(64) >= num_workers);
  CHECK(product.NumUnits(64) <= 4 * num_workers);
  CHECK(product.NumUnits(2) < product.NumUnits(64));
}

TEST(ALargeProductIsDividedAmongAllWorkers) {
  const Portable portable;
  for (const Product& product : {Product(1024, 1024, 1024), Product(4, 4096, 16384)}) {
    for (int num_workers : {2, 64}) {
      CHECK(product.NumUnits(num_workers) >= 2 * num_workers);
      CHECK_EQ(product.NumUnits(num_workers),
               PlanGemm(product.problem(), num_workers)->num_units());
    }
  }
}

TEST(AnEmptyProductCostsNothing) {
  CHECK_EQ(EstimateGemmUs(Product(0, 1024, 1024).problem()), 0);
  CHECK_EQ(EstimateGemmUs(Product(1024, 1024, 0).problem()), 0);
}

TEST(FewRowsAreEstimatedByTheBytesOfB) {
  const Product f32(1, 4096, 4096);
  const Product bf16(1, 4096, 4096, DType::kBF16);
  for (const KernelSet* kernels : {IsaInUse().general, IsaInUse().bf16}) {
    CHECK_EQ(EstimateCpuGemmUs(f32.problem(), *kernels),
             2 * EstimateCpuGemmUs(bf16.problem(), *kernels));
  }
}

TEST(EveryInstructionSetIsEstimatedToBeAsFastAsThoseBeforeItOrFaster) {
  const std::string_view before = CurrentIsa();
  const Product product(64, 512, 64, DType::kBF16);
  double least = std::numeric_limits<double>::infinity();
  for (std::string_view isa : AvailableIsas()) {
    SetIsa(isa);
    const double us = EstimateGemmUs(product.problem());
    CHECK(us > 0 && us <= least);
    least = us;
  }
  SetIsa(before);
}

}  // namespace
}  // namespace jax_ub

CHECK_MAIN()
