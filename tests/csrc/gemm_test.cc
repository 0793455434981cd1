// The GEMM against a naive product, on every instruction set that this machine has.

#include "gemm/gemm.h"

#include "check.h"
#include "compare_gemm.h"
#include "gemm/cpu/isa.h"

namespace jax_ub {

void CompareWithReference(Values values, int num_problems, uint64_t first_seed) {
  const std::string_view in_use = CurrentIsa();
  for (std::string_view isa : AvailableIsas()) {
    SetIsa(isa);
    for (int i = 0; i < num_problems; ++i) {
      CompareOne(first_seed + i, values, IsaInUse());
    }
  }
  SetIsa(in_use);
}

TEST(products_of_small_integers_are_exact) {
  CompareWithReference(Values::kIntegers, 400, 1);
}

TEST(products_of_normal_numbers_are_close) {
  CompareWithReference(Values::kNormal, 200, 10001);
}

}  // namespace jax_ub

CHECK_MAIN()
