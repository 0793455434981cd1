#define JAX_UB_KERNELS kernels_amx_bf16
#include "gemm/cpu/simd_avx512.h"
// simd_avx512.h must be included first: kernel_set.h uses its vector type.
#include "gemm/cpu/kernel_set.h"
#include "gemm/cpu/simd_bf16_pairs.h"
// simd_bf16_pairs.h must be included first: amx_tile_kernel.h uses its functions.
#include "gemm/cpu/amx_tile_kernel.h"

namespace jax_ub {

namespace kernels_amx_bf16 {

// Returns the kernels that multiply in AMX tile registers. None of them packs B while
// it multiplies: such kernels were slower for few rows and not faster for more. Blocks
// of K are long, because sums that leave the registers do not fit into the L2 cache.
constexpr KernelSet KernelsOfTileRegisters(const char* isa) {
  KernelSet set = {};
  set.isa = isa;
  set.tile_rows = 2 * kAmxRows;
  set.tile_columns = kAmxColumns;
  set.whole_rows = kAmxRows;
  set.panel_of_a = 1;
  set.k_per_word = 2;
  set.k_block = 1024;
  set.gflops = 800;
  set.reads_a_in_place = true;
  for (int rows = 1; rows <= 2 * kAmxRows; ++rows) {
    set.tile_of_rows[rows - 1] = rows <= kAmxRows ? AmxTile<false> : AmxTile<true>;
  }
  ForEachPairDType([&]<DType kDType>() {
    const int i = static_cast<int>(kDType);
    set.widen[i] = ConvertToBF16<kDType>;
    set.pack_a.transposed[i] = CopyRows<kDType>;
    set.pack_a.copied[i] = TransposeToRows<kDType>;
    set.pack_b.transposed[i] = PackTransposed<AdjacentPairs<kDType>, kAmxColumns>;
    set.pack_b.copied[i] = PackCopied<Pairs<kDType>, kAmxColumns>;
  });
  set.scale = ScalePairs;
  AddSmallM<kMaxRowsOfAnyB>(set);
  set.sum = Sum;
  set.begin = ConfigureTiles;
  set.end = ReleaseTiles;
  return set;
}

}  // namespace kernels_amx_bf16

constinit const KernelSet kAmxBf16Kernels =
    kernels_amx_bf16::KernelsOfTileRegisters("amx_bf16");

}  // namespace jax_ub
