#define JAX_UB_KERNELS kernels_avx512_bf16
#include "gemm/cpu/simd_avx512.h"
// kernel_set.h uses the vector types of the header above, so it must follow it.
#include "gemm/cpu/kernel_set.h"
#include "gemm/cpu/simd_bf16_pairs.h"

namespace jax_ub {

namespace kernels_avx512_bf16 {

// A pair of bf16 that is contiguous in memory is packed like one f32 word, which is why
// `transposed` uses DType::kF32.
template <int kRows, int kVectors>
constexpr KernelSet KernelsOfPairs(const char* isa) {
  constexpr int kColumns = kVectors * kLanes;
  constexpr int kBF16 = static_cast<int>(DType::kBF16);
  KernelSet set = {};
  set.isa = isa;
  set.tile_rows = kRows;
  set.whole_rows = 1;
  set.panel_of_a = kRows;
  set.tile_columns = kColumns;
  set.k_per_word = 2;
  set.k_block = 1024;
  set.gflops = 210;
  set.reads_a_in_place = true;
  AddTiles<kRows, kVectors, MultiplyAddPairs>(set);
  AddPackingTile<Pairs, kRows, kVectors, MultiplyAddPairs>(set, DType::kBF16);
  set.pack_a.transposed[kBF16] = PackTransposed<DType::kF32, kRows>;
  set.pack_a.copied[kBF16] = PackCopied<Pairs, kRows>;
  set.pack_b.transposed[kBF16] = PackTransposed<DType::kF32, kColumns>;
  set.pack_b.copied[kBF16] = PackCopied<Pairs, kColumns>;
  AddSmallM<kMaxSmallM>(set);
  set.sum = Sum;
  return set;
}

}  // namespace kernels_avx512_bf16

constinit const KernelSet kAvx512Bf16Kernels =
    kernels_avx512_bf16::KernelsOfPairs<6, 4>("avx512_bf16");

}  // namespace jax_ub
