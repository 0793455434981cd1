// Builds the kernel set of an instruction set: a table of functions. This header must
// be included after the simd header of the instruction set, whose vector type it uses.
#pragma once

#include "gemm/cpu/kernels.h"
#include "gemm/cpu/pack_kernel.h"
#include "gemm/cpu/quantize_kernel.h"
#include "gemm/cpu/small_m_kernel.h"
#include "gemm/cpu/sum_kernel.h"
#include "gemm/cpu/tile_kernel.h"

namespace jax_ub::JAX_UB_KERNELS {

template <int kPanel, template <DType> typename Words>
constexpr PanelPackers PackersToF32() {
  PanelPackers packers = {};
  ForEachDType([&]<DType kDType>() {
    const int i = static_cast<int>(kDType);
    packers.transposed[i] = PackTransposed<Words<kDType>, kPanel>;
    packers.copied[i] = PackCopied<Words<kDType>, kPanel>;
  });
  return packers;
}

// Adds tile functions for 1 to kRows rows, so that the last rows of M do not cost a
// full tile.
template <int kRows, int kVectors, Vec (*multiply_add)(Vec, Vec, Vec)>
constexpr void AddTiles(KernelSet& set) {
  set.tile_of_rows[kRows - 1] = Tile<Packed, kRows, kVectors, false, multiply_add>;
  set.tile_of_columns[kRows - 1] = Tile<Packed, kRows, kVectors, true, multiply_add>;
  if constexpr (kRows > 1) AddTiles<kRows - 1, kVectors, multiply_add>(set);
}

template <typename Words, int kRows, int kVectors, Vec (*multiply_add)(Vec, Vec, Vec)>
constexpr void AddPackingTile(KernelSet& set, DType dtype) {
  const int i = static_cast<int>(dtype);
  set.packing_tile_of_rows[i] = Tile<Words, kRows, kVectors, false, multiply_add>;
  set.packing_tile_of_columns[i] = Tile<Words, kRows, kVectors, true, multiply_add>;
}

// Maximum number of rows of A for which the kernels for few rows (small_m_kernel.h) are
// faster than all tile kernels. For up to kMaxSmallM rows, they are still faster than
// tile kernels of f32, unless B is FP8, or B is contiguous along N and a vector has
// fewer than 16 lanes. Measured with gemm_bench on a Xeon without AMX. Tile kernels of
// bf16 pairs were measured only for up to kMaxRowsOfAnyB rows.
inline constexpr int kMaxRowsOfAnyB = 4;

// Adds the kernels for few rows of A (small_m_kernel.h) where they are faster than
// tiles. These kernels convert elements to f32, so a word has one element, even if
// k_per_word is 2.
template <int kRows>
constexpr void AddSmallM(KernelSet& set) {
  constexpr bool kIsFew = kRows <= kMaxRowsOfAnyB;
  ForEachDType([&]<DType kDType>() {
    const int i = static_cast<int>(kDType);
    if constexpr (kIsFew || !IsFp8(kDType)) {
      set.small_m[kRows - 1].dots[i] = MultiplyDots<kRows, kDType>;
    }
    if constexpr (kIsFew || (!IsFp8(kDType) && kLanes >= 16)) {
      set.small_m[kRows - 1].column_blocks[i] = MultiplyColumnBlock<kRows, kDType>;
    }
  });
  if constexpr (kRows > 1) AddSmallM<kRows - 1>(set);
}

// Adds the kernels that quantize the dtypes of results to FP8.
constexpr void AddQuantization(KernelSet& set) {
  ForEachDType([&]<DType kFrom>() {
    if constexpr (InfoOf(kFrom).is_result) {
      const int from = static_cast<int>(kFrom);
      set.amax[from] = Amax<kFrom>;
      set.cast[from][static_cast<int>(DType::kE4M3)] = Cast<kFrom, DType::kE4M3>;
      set.cast[from][static_cast<int>(DType::kE5M2)] = Cast<kFrom, DType::kE5M2>;
    }
  });
}

// Returns the kernel set of an instruction set whose tile kernels multiply f32.
// `Words<dtype>` converts elements to f32 while they are packed.
template <int kRows, int kVectors, template <DType> typename Words = Widened>
constexpr KernelSet KernelsOfF32(const char* isa,
                                 double gflops,
                                 int k_block,
                                 bool reads_a_in_place) {
  KernelSet set = {};
  set.isa = isa;
  set.tile_rows = kRows;
  set.whole_rows = 1;
  set.panel_of_a = kRows;
  set.tile_columns = kVectors * kLanes;
  set.k_per_word = 1;
  set.k_block = k_block;
  set.gflops = gflops;
  set.reads_a_in_place = reads_a_in_place;
  AddTiles<kRows, kVectors, MultiplyAdd>(set);
  ForEachDType([&]<DType kDType>() {
    AddPackingTile<Words<kDType>, kRows, kVectors, MultiplyAdd>(set, kDType);
    set.widen[static_cast<int>(kDType)] = WidenRow<Words<kDType>>;
  });
  set.pack_a = PackersToF32<kRows, Words>();
  set.pack_b = PackersToF32<kVectors * kLanes, Words>();
  set.scale = ScaleF32;
  AddSmallM<kMaxSmallM>(set);
  set.sum = Sum;
  AddQuantization(set);
  return set;
}

}  // namespace jax_ub::JAX_UB_KERNELS
