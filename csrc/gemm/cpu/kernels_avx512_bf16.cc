#define JAX_UB_KERNELS kernels_avx512_bf16
#include "gemm/cpu/simd_avx512.h"
// simd_avx512.h must be included first: kernel_set.h uses its vector type.
#include "gemm/cpu/kernel_set.h"
#include "gemm/cpu/simd_bf16_pairs.h"

namespace jax_ub {

namespace kernels_avx512_bf16 {

template <int kRows, int kVectors>
constexpr KernelSet KernelsOfPairs(const char* isa) {
  constexpr int kColumns = kVectors * kLanes;
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
  ForEachPairDType([&]<DType kDType>() {
    const int i = static_cast<int>(kDType);
    AddPackingTile<Pairs<kDType>, kRows, kVectors, MultiplyAddPairs>(set, kDType);
    set.widen[i] = ConvertToBF16<kDType>;
    set.pack_a.transposed[i] = PackTransposed<AdjacentPairs<kDType>, kRows>;
    set.pack_a.copied[i] = PackCopied<Pairs<kDType>, kRows>;
    set.pack_b.transposed[i] = PackTransposed<AdjacentPairs<kDType>, kColumns>;
    set.pack_b.copied[i] = PackCopied<Pairs<kDType>, kColumns>;
  });
  set.scale = ScalePairs;
  AddSmallM<kMaxRowsOfAnyB>(set);
  set.sum = Sum;
  return set;
}

}  // namespace kernels_avx512_bf16

constinit const KernelSet kAvx512Bf16Kernels =
    kernels_avx512_bf16::KernelsOfPairs<6, 4>("avx512_bf16");

}  // namespace jax_ub
