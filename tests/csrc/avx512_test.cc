// Tests the AVX512, AVX512_VBMI and AVX512_BF16 kernels with emulated intrinsics. Compiles the same
// source under other names, so that both versions can be linked.

#include "check.h"
#include "compare_gemm.h"
#include "fp8_codes.h"
#include "gemm/cpu/isa.h"

namespace jax_ub {

extern const KernelSet kEmulatedKernels;

}  // namespace jax_ub

#define JAX_UB_EMULATE_AVX512
#define kernels_avx512_bf16 emulated_kernels
#define kAvx512Bf16Kernels kEmulatedKernels
#include "gemm/cpu/kernels_avx512_bf16.cc"
#undef kAvx512Bf16Kernels

namespace jax_ub {

// The f32 kernels of AVX512 and AVX512_VBMI, from the same headers. The small block of K makes problems
// span several blocks.
constinit const KernelSet kGeneral =
    emulated_kernels::KernelsOfF32<6, 4>("f32", 105, 64, true);
constinit const KernelSet kGeneralOfVbmi =
    emulated_kernels::KernelsOfF32<6, 4, emulated_kernels::WidenedByBytes>(
        "f32, VBMI", 105, 64, true);
constinit const KernelSet kPairs = [] {
  KernelSet set = emulated_kernels::KernelsOfPairs<6, 4>("pairs");
  set.k_block = 64;
  return set;
}();

constexpr Isa kSmallBlocks = {&kGeneral, &kPairs, nullptr};
constexpr Isa kEmulated = {&kGeneral, &kEmulatedKernels, nullptr};

TEST(emulated_products_of_small_integers_are_exact) {
  for (uint64_t seed = 1; seed <= 300; seed += kCaseStep) {
    CompareOne(seed, Values::kIntegers, seed % 4 ? kSmallBlocks : kEmulated);
  }
}

TEST(emulated_products_of_normal_numbers_are_close) {
  for (uint64_t seed = 10001; seed <= 10100; seed += kCaseStep) {
    CompareOne(seed, Values::kNormal, seed % 4 ? kSmallBlocks : kEmulated);
  }
}

TEST(emulated_pairs_are_exact_for_every_tail) {
  CompareTails(kPairs, 13, {1, 2, 31, 32, 33, 65});
}

TEST(emulated_fp8_products_are_exact) {
  CompareAllCodes(kGeneral);
  CompareAllCodes(kGeneralOfVbmi);
  CompareAllCodes(kPairs);
  for (uint64_t seed = 1; seed <= 60; seed += kCaseStep) {
    CompareOne(seed, Values::kIntegers, kSmallBlocks, kFp8Pairs[seed % 3]);
  }
  CompareTails(kPairs, 13, {1, 2, 33}, kFp8Pairs[1]);
  CompareTails(kGeneralOfVbmi, 13, {2, 65}, kFp8Pairs[1]);
}

// Compares the kernels' conversions with simple reference conversions.
TEST(emulated_sums_round_once_to_nearest_even) {
  Random random(5);
  std::vector<float> wide(4096);
  for (float& x : wide) {
    const uint32_t bits = static_cast<uint32_t>(random());
    x = std::bit_cast<float>(bits & (Pick(random, 0, 1) ? ~0u : 0xfffff000u));
  }
  for (DType dtype : {DType::kBF16, DType::kF16}) {
    const Summand summand = {wide.data(), 0, DType::kF32};
    std::vector<std::byte> found(2 * wide.size());
    kEmulatedKernels.sum(&summand, 1, 1, 4096, found.data(), 0, dtype);
    for (size_t i = 0; i < wide.size(); ++i) {
      std::byte expected[4];
      Write(expected, dtype, wide[i]);
      const float x = Read(&found[2 * i], dtype);
      CHECK(x == Read(expected, dtype) || (std::isnan(x) && std::isnan(wide[i])));
    }
  }
}

}  // namespace jax_ub

CHECK_MAIN()
