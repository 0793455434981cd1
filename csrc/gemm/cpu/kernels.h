// The interface between the GEMM and the kernels of an instruction set: functions over
// raw pointers.
//
// Each kernel file is compiled with the flags of its instruction set. Therefore it
// includes only this header, the kernel headers, C headers and intrinsics, and puts
// everything in a separate namespace, so that the linker cannot merge inline functions
// that were compiled for different instruction sets.
//
// A *word* is the 32 bits along K that one multiply-add consumes: one f32, or a pair of
// bf16 for two consecutive k (the lower k at the lower address).
#pragma once

#include <stdint.h>

#include "gemm/dtype.h"

namespace jax_ub {

inline constexpr int kMaxTileRows = 32;
inline constexpr int kMaxTileColumns = 64;

// Where and how a tile kernel stores its sums: to[r, c] = round(before[r, c] + sum[r,
// c] + after[r, c]), added in this order. If `factor` is not 1, each sum is multiplied by
// it, and `after` is null. All strides in this file are in bytes.
struct TileOutput {
  void* to = nullptr;
  int64_t to_stride = 0;
  DType to_dtype = DType::kF32;
  const float* before = nullptr;  // sums of earlier blocks of K, [row][column]
  const void* after = nullptr;    // an addend; may be the memory of `to`
  int64_t after_stride = 0;
  DType after_dtype = DType::kF32;
  float factor = 1;
};

inline constexpr int kLineBytes = 64;  // size of a cache line
inline constexpr int kStepWords = 8;   // words of K between two prefetches of a tile

// A position in the memory that will be packed next, which consists of rows of
// `row_bytes` bytes, `stride` bytes apart. Tile kernels prefetch this memory while they
// multiply. Each tile continues where the previous tile stopped.
struct PrefetchCursor {
  const char* row = nullptr;  // the row of the next cache line
  int64_t row_bytes = 0;
  int64_t stride = 0;
  int64_t num_rows = 0;  // remaining rows, including `row`
  int64_t at = 0;        // offset of the next cache line in the row
  int64_t lines_per_step = 0;
};

// A panel of B with tile_columns columns. Usually it is packed before it is used. A
// *packing tile* is a tile kernel that packs the panel while it multiplies: it reads B
// at `source`.
struct BPanel {
  void* words;                   // word (k, c) is at words + 4 * (k * tile_columns + c)
  const void* source = nullptr;  // B in place, with contiguous columns; null: packed
  int64_t source_stride = 0;     // distance of the source's rows
};

// The type of tile kernels, which compute sum[r, c] = sum_k A[r, k] * B[k, c] for a
// fixed number of rows r, for c < tile_columns and for k < num_words. A may be packed
// or in place, in one of two layouts:
//
//   rows:    word (r, k) is at a + r * a_stride + 4 * k    (contiguous along K)
//   columns: word (r, k) is at a + k * a_stride + 4 * r    (contiguous along M)
//
// A packing tile reads B from `b.source`, and writes the packed words to `b.words`,
// from where later tiles read them.
using TileFunction = void (*)(const void* a,
                              int64_t a_stride,
                              const BPanel& b,
                              int64_t num_words,
                              const TileOutput& output,
                              PrefetchCursor& prefetch);

// Packs `outer` x `num_words` words into panels of `panel` columns, where `panel` is a
// constant of the function. Word (o, k) goes to panels + o / panel * panel_bytes + 4 *
// (k * panel + o % panel). The source is contiguous along one dimension. Neighbors
// along the other dimension are `stride` bytes apart.
using PackFunction = void (*)(const void* source,
                              int64_t stride,
                              int64_t outer,
                              int64_t num_words,
                              void* panels,
                              int64_t panel_bytes);

struct Summand {
  const void* data;
  int64_t row_stride;  // in bytes
  DType dtype;
};

// Computes out[r, c] = round(sum_i summands[i][r, c]), added in f32 in the order of i.
// `out` may be the memory of a summand.
using SumFunction = void (*)(const Summand* summands,
                             int num_summands,
                             int64_t rows,
                             int64_t columns,
                             void* out,
                             int64_t out_stride,
                             DType out_dtype);

// Computes sums[m, c] += sum_k A[m, k] * B[k, c] for up to kMaxSmallM rows and any
// number of columns. Reads B in place (small_m_kernel.h).
using SmallMFunction = void (*)(const void* a,
                                int64_t a_stride,
                                const void* b,
                                int64_t b_stride,
                                int64_t num_words,
                                int64_t columns,
                                void* sums,
                                int64_t sums_stride);

inline constexpr int kMaxSmallM = 8;

// Converts `count` consecutive elements to the dtype that the words of the kernel set
// contain: bf16 if k_per_word is 2, otherwise f32.
using WidenFunction = void (*)(const void* from, int64_t count, void* to);

// Multiplies packed FP8 elements by scales, which are powers of two, so that the
// products are exact. Word (r, i) is at words + r * row_bytes + 4 * i, for r < num_rows
// and i < num_words. In a word of two bf16, the element with the lower k is multiplied
// by low[i], and the element with the upper k by high[i]. A word of one f32 is
// multiplied by low[i].
using ScaleFunction = void (*)(void* words,
                               int64_t row_bytes,
                               int64_t num_rows,
                               int64_t num_words,
                               const float* low,
                               const float* high);

// Number of elements that the kernels of quantization process at a time.
inline constexpr int kQuantizeBlock = 32;

// Computes out[i] = round(from[i] * first[i] * second[i]), where `round` clips to the
// largest number of an FP8 dtype and then rounds to nearest even. A NaN stays a NaN.
// Without `per_element`, first[0] and second[0] belong to all elements. Otherwise, both
// arrays are padded to a multiple of kQuantizeBlock elements.
using CastFunction = void (*)(const void* from,
                              int64_t count,
                              const float* first,
                              const float* second,
                              bool per_element,
                              uint8_t* out);

// Computes maxima[i] = max(maxima[i], min(|from[i]|, limit)). Without `per_element`,
// maxima[0] belongs to all elements. The maxima and the limit are the bits of f32
// numbers, which are compared as integers, so that a NaN is larger than an infinity.
using AmaxFunction = void (*)(
    const void* from, int64_t count, bool per_element, int32_t limit, int32_t* maxima);

// The kernels for products with few rows of A, indexed by the dtype of B. An entry is
// null where tile kernels are faster.
struct SmallMKernels {
  SmallMFunction dots[kNumDTypes];           // for B that is contiguous along K
  SmallMFunction column_blocks[kNumDTypes];  // for B that is contiguous along N
};

struct PanelPackers {
  PackFunction transposed[kNumDTypes];  // for a source that is contiguous along K
  PackFunction copied[kNumDTypes];      // for one contiguous along the outer dimension
};

// The kernels of an instruction set. Arrays are indexed by DType, unless their comment
// says otherwise.
struct KernelSet {
  const char* isa;
  int tile_rows;
  int tile_columns;
  int whole_rows;  // tiles read and write rows in multiples of this, up to tile_rows
  int panel_of_a;  // width of A's panels: tile_rows, or 1 if only tile_of_rows exists
  int k_per_word;  // elements of K per word: 1 (widened to f32) or 2 (pairs of bf16)
  int k_block;     // maximum number of words of K that a tile sums in registers
  // Approximate GFLOP/s of one thread, from which the number of threads is chosen.
  // Measured for 1024 x 1024 x 1024 with tests/csrc/gemm_bench.cc on Zen 4, except for
  // AMX.
  double gflops;
  bool reads_a_in_place;  // whether rows of A that need no widening are read in place
  TileFunction tile_of_rows[kMaxTileRows];           // [rows - 1]
  TileFunction tile_of_columns[kMaxTileRows];        // [rows - 1]; if panel_of_a > 1
  TileFunction packing_tile_of_rows[kNumDTypes];     // tile_rows rows; may be null
  TileFunction packing_tile_of_columns[kNumDTypes];  // tile_rows rows; may be null
  WidenFunction widen[kNumDTypes];
  PanelPackers pack_a;                // to panels of width panel_of_a
  PanelPackers pack_b;                // to panels of width tile_columns
  ScaleFunction scale;                // of packed words
  SmallMKernels small_m[kMaxSmallM];  // [rows - 1]
  SumFunction sum;
  CastFunction cast[kNumDTypes][kNumDTypes];  // [from][to]; null unless `to` is FP8
  AmaxFunction amax[kNumDTypes];              // null for FP8
  void (*begin)();  // a thread calls it before its first tile; may be null
  void (*end)();    // a thread calls it after its last tile; may be null
};

extern const KernelSet kPortableKernels;
#if defined(__x86_64__)
extern const KernelSet kAvx2Kernels;
extern const KernelSet kAvx512Kernels;
extern const KernelSet kAvx512VbmiKernels;
// Kernels for operands whose values bf16 represents exactly. A word is a pair of bf16
// (k_per_word is 2).
extern const KernelSet kAvx512Bf16Kernels;
extern const KernelSet kAmxBf16Kernels;
#endif

}  // namespace jax_ub
