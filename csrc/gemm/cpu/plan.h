// Plans a GEMM on the CPU: divides it into work units, and computes a unit.
#pragma once

#include <cstdint>
#include <memory>

#include "gemm/cpu/blocking.h"
#include "gemm/cpu/isa.h"
#include "gemm/cpu/operand.h"
#include "gemm/cpu/result.h"
#include "gemm/gemm.h"

namespace jax_ub {

// Plans a product as PlanGemm does, but with the given kernels instead of those of the
// current instruction set.
std::unique_ptr<GemmPlan> PlanCpuGemm(GemmProblem problem,
                                      const KernelSet& kernels,
                                      const Workers& workers);

// The plan of a product that is computed tile by tile, from packed operands or in
// place. It is used for all products that SmallMPlan does not support.
class TiledPlan : public GemmPlan {
 public:
  TiledPlan(GemmProblem problem, const KernelSet& kernels, const Workers& workers);

  int64_t num_units() const override { return num_unit_rows_ * num_unit_columns_; }
  void Run(int64_t unit, Scratch& scratch) const override;

 private:
  // Pointers to the parts of the scratch memory that a unit uses.
  struct Workspace {
    std::byte* packed_a;  // [row tile of a block][panel]
    std::byte* packed_b;  // [column tile of the unit, or of a group][panel]
    float* sums;          // [column tile of the unit][row tile of the unit][tile]
    float* rows;          // [row of a tile][column of the unit], if c_.stores_rows()
  };

  // The state of one panel of B while all row tiles are multiplied with it.
  // `panel.source` is set until the first tile has packed the panel.
  struct BPanelState {
    BPanel panel;
    PrefetchCursor prefetch = {};  // the memory of the next panel
    // Whether the tile that packs this panel also prefetches the next panel.
    bool prefetch_in_packing_tile = false;
  };

  // Multiplies A[rows, k] by B[k, columns], where `k` is block number `k_index` of K.
  // Adds the product to the sums of the earlier blocks. The last block stores the sums
  // in C.
  void RunBlock(Range rows,
                Range columns,
                int64_t k_index,
                const Workspace& workspace) const;
  // Returns how many rows of a unit need memory for sums at a time: all of them if K
  // has several blocks, otherwise block_rows.
  int64_t RowsOfSums(Range rows) const;
  // Returns block number `k_index` of K, or an empty range after the last one.
  Range BlockOfK(int64_t k_index) const;
  // Stores the rows `block` of the result, in all columns of a work unit. `sums` has
  // the finished sums of these rows as tiles, [column tile][row_tiles]. Each row is
  // first assembled in the buffer `rows`. Called only if c_.stores_rows().
  void StoreRows(Range block,
                 Range columns,
                 const float* sums,
                 int64_t row_tiles,
                 float* rows) const;
  // Returns the size of one packed tile of A with `k` elements of K, in bytes.
  int64_t TileBytesOfA(int64_t k) const {
    return kernels_.tile_rows / kernels_.panel_of_a * a_.PanelBytes(k);
  }
  // Packs rows `block` of A, unless tile kernels can read them in place. Sets `tiles`
  // to the tiles of these rows.
  void ReadA(Range block, Range k, std::byte* packed, ATile* tiles) const;
  // Prepares a panel of B for a multiplication by `num_rows` rows of A. Packs the
  // panel, or sets `b.panel.source` so that the first tile packs it. Returns the end of
  // the columns that are prepared, which may be several panels.
  //
  // Also sets `b.prefetch` to the memory that will be packed next: the following panel
  // or, after the last columns of the work unit (`unit`), the first panel of the next
  // block of K (`next_k`).
  int64_t ReadB(Range unit,
                Range columns,
                Range k,
                Range next_k,
                int64_t num_rows,
                BPanelState& b) const;
  // Multiplies all tiles in rows `rows` of A with one panel of B.
  void MultiplyPanel(const ATile* a,
                     BPanelState& b,
                     Range rows,
                     Range columns,
                     Range k,
                     float* sums) const;
  // Prefetches the memory where a tile of the result will be stored, if `k` is the last
  // block of K.
  void Prefetch(Range rows, Range columns, Range k) const;
  // Multiplies one tile of A with a panel of B over one segment along K. Multiplies the
  // product by the factors of this segment, and adds it to `sums`.
  void MultiplySegment(const TileFunction tile,
                       const ATile& a,
                       BPanelState& b,
                       Range rows,
                       Range columns,
                       Range k,
                       PrefetchCursor& prefetch,
                       float* sums) const;
  // Multiplies one tile of A with a panel of B. Stores the tile in `sums` or, if `k` is
  // the last block of K, in the result.
  void MultiplyTile(const ATile& a,
                    BPanelState& b,
                    Range rows,
                    Range columns,
                    Range k,
                    float* sums) const;

  const GemmProblem problem_;
  const KernelSet& kernels_;
  const GemmBlocking blocking_;
  const OperandReader a_;
  const OperandReader b_;
  const ResultWriter c_;
  const int64_t tile_floats_;
  // Distance between the sums of two tiles in the workspace, in floats. It is 0 if all
  // tiles use the same memory one after the other.
  const int64_t sums_step_;
  const int64_t num_unit_rows_;
  const int64_t num_unit_columns_;
};

}  // namespace jax_ub
