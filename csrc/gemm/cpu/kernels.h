// What an instruction set provides to the GEMM: plain functions over raw pointers.
//
// Kernel files are compiled with their own instruction set flags, so they include only
// this header, C headers and intrinsics, and put everything into a namespace of their
// own.
//
// A *word* is what one multiply-add consumes of K: one f32, or a pair of bf16 (two
// consecutive k; the lower address is the lower k). Words are 32 bits in either case.
#pragma once

#include <stdint.h>

#include "gemm/dtype.h"

namespace jax_ub {

inline constexpr int kMaxTileRows = 32;

// Where the sums of a tile go:
//   to[r, c] = round(before[r, c] + sum[r, c] + after[r, c]), added in this order.
// Strides are in bytes, as all of them here.
struct TileOutput {
  void* to;
  int64_t to_stride;
  DType to_dtype;
  const float* before;  // the sums of earlier blocks of K, [row][column]; null: none
  const void* after;    // an addend, which may be the memory of `to`; null: none
  int64_t after_stride;
  DType after_dtype;
};

inline constexpr int kLineBytes = 64;  // of the caches
inline constexpr int kStepWords = 8;   // of K, between two times that a tile asks

// Memory that will be packed next: rows of `row_bytes`, `stride` apart. Tiles ask for
// its lines while they multiply, each from where the one before left off.
struct PrefetchCursor {
  const char* row = nullptr;  // the one that the next line is of
  int64_t row_bytes = 0;
  int64_t stride = 0;
  int64_t num_rows = 0;  // that are left
  int64_t at = 0;        // where in the row
  int64_t lines_per_step = 0;
};

struct BPanel {
  void* words;                   // word (k, c) at words + 4 * (k * tile_columns + c)
  const void* source = nullptr;  // of a packing tile: B in place, columns contiguous
  int64_t source_stride = 0;     // of the source's rows, in bytes
};

// sum[r, c] = sum_k A[r, k] * B[k, c], r < rows of the function, c < tile_columns,
// k < num_words.
// A is either
//   rows:    word (r, k) at a + r * a_stride + 4 * k    (K contiguous; in place or packed)
//   columns: word (r, k) at a + k * a_stride + 4 * r    (M contiguous; in place or packed)
// A packing tile reads B at its source, and writes the words for the tiles after it.
using TileFunction = void (*)(const void* a,
                              int64_t a_stride,
                              const BPanel& b,
                              int64_t num_words,
                              const TileOutput& output,
                              PrefetchCursor& prefetch);

// Packs a rectangle of `outer` x `num_words` words into panels: word (o, k) goes to
// panels + o / panel * panel_bytes + 4 * (k * panel + o % panel), where `panel` is the
// width that the function is made for. `stride` is the distance in bytes of two
// elements that are neighbours along the dimension that is not contiguous in the
// source.
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

// out[r, c] = round(sum_i summands[i][r, c]), added in f32 in the order of i, rounded
// once. `out` may be the memory of a summand. Strides are in bytes.
using SumFunction = void (*)(const Summand* summands,
                             int num_summands,
                             int64_t rows,
                             int64_t columns,
                             void* out,
                             int64_t out_stride,
                             DType out_dtype);

// sums[m, c] += sum_k A[m, k] * B[k, c] for few rows and any number of columns, with B
// in place (see few_rows_kernel.h).
using SmallMFunction = void (*)(const void* a,
                                int64_t a_stride,
                                const void* b,
                                int64_t b_stride,
                                int64_t num_words,
                                int64_t columns,
                                void* sums,
                                int64_t sums_stride);

inline constexpr int kMaxSmallM = 4;

struct SmallMKernels {
  SmallMFunction dots[kNumDTypes];           // B is K contiguous
  SmallMFunction column_blocks[kNumDTypes];  // B is contiguous along its columns
};

struct PanelPackers {
  PackFunction transposed[kNumDTypes];  // source is K contiguous
  PackFunction copied[kNumDTypes];  // source is contiguous along the outer dimension
};

struct KernelSet {
  const char* isa;
  int tile_rows;
  int tile_columns;
  int whole_rows;  // tiles read and write rows in multiples of this, up to tile_rows
  int panel_of_a;  // the width of A's panels: tile_rows, or 1 of tiles of rows alone
  int k_per_word;  // elements of K in a word: 1, operands are widened to f32; 2, bf16 pairs
  int k_block;  // words of K that a tile sums before its sums leave the registers
  // GF/s of one thread in a product of 1024 x 1024 x 1024, rough: decides how many threads
  // a product is cut for. Measured with tests/csrc/gemm_bench.cc on Zen 4, except for AMX.
  double gflops;
  bool reads_a_in_place;  // rows of A that need no widening are not packed
  TileFunction tile_of_rows[kMaxTileRows];           // [rows - 1]
  TileFunction tile_of_columns[kMaxTileRows];        // [rows - 1]; of panel_of_a > 1
  TileFunction packing_tile_of_rows[kNumDTypes];     // tile_rows rows; null: none packs
  TileFunction packing_tile_of_columns[kNumDTypes];  // [B's dtype]
  PanelPackers pack_a;                               // panels panel_of_a wide
  PanelPackers pack_b;                               // panels tile_columns wide
  SmallMKernels small_m[kMaxSmallM];                 // [rows - 1]
  SumFunction sum;
  void (*begin)();  // before a thread's tiles, and after them; null: nothing to do
  void (*end)();
};

extern const KernelSet kPortableKernels;
#if defined(__x86_64__)
extern const KernelSet kAvx2Kernels;
extern const KernelSet kAvx512Kernels;
extern const KernelSet kAvx512Bf16Kernels;  // k_per_word 2: both operands are bf16
extern const KernelSet kAmxBf16Kernels;     // likewise
#endif

}  // namespace jax_ub
