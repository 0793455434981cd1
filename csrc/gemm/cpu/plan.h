// The plan of a GEMM on the CPU: divides it into units, and units into blocks that fit
// the caches.
#pragma once

#include <cstdint>
#include <vector>

#include "gemm/cpu/isa.h"
#include "gemm/cpu/operand.h"
#include "gemm/cpu/result.h"
#include "gemm/gemm.h"

namespace jax_ub {

// Like PlanGemm, but with explicitly chosen kernels.
std::unique_ptr<GemmPlan> PlanCpuGemm(GemmProblem problem,
                                      const KernelSet& kernels,
                                      const Workers& workers);

// Like EstimateGemmUs, but with explicitly chosen kernels.
double EstimateCpuGemmUs(const GemmProblem& problem, const KernelSet& kernels);

// Sizes of units and blocks, in elements. A unit computes unit_rows x unit_columns
// elements of C, one block of K after the other. Block i of K is [k_bounds[i],
// k_bounds[i + 1]). For each, it multiplies block_rows rows of A with one panel of B
// after the other, tile by tile.
struct GemmBlocking {
  int64_t unit_rows = 0;
  int64_t unit_columns = 0;
  std::vector<int64_t> k_bounds;
  int64_t k_block = 0;  // length of the longest block of K
  int64_t block_rows = 0;

  int64_t num_k_blocks() const { return static_cast<int64_t>(k_bounds.size()) - 1; }
};

// Chooses the blocking from the sizes, the bounds along K, the kernels and the number
// of workers.
GemmBlocking ChooseBlocking(const GemmProblem& problem,
                            const KernelSet& kernels,
                            int num_workers);

// The GEMM plan for products with more than kMaxSmallM rows of A.
class TiledPlan : public GemmPlan {
 public:
  TiledPlan(GemmProblem problem, const KernelSet& kernels, const Workers& workers);

  int64_t num_units() const override { return num_unit_rows_ * num_unit_columns_; }
  void Run(int64_t unit, Scratch& scratch) const override;

 private:
  // Pointers into the scratch memory of a unit.
  struct Workspace {
    std::byte* packed_a;  // [row tile of a block][panel]
    std::byte* packed_b;  // [column tile of the unit, or of a group][panel]
    float* sums;          // [column tile of the unit][row tile of the unit][tile]
    float* rows;          // [row of a tile][column of the unit], if c_.stores_rows()
  };

  // The state of a panel of B while it is multiplied with all row tiles. `panel.source`
  // is set until the first tile has packed the panel.
  struct BPanelState {
    BPanel panel;
    PrefetchCursor prefetch = {};  // the memory of the next panel
    // Whether the tile that packs this panel also prefetches the next panel.
    bool prefetch_in_packing_tile = false;
  };

  // Computes one block of K of a unit: C[rows, columns] (+)= A[rows, k] B[k, columns].
  void RunBlock(Range rows,
                Range columns,
                int64_t k_index,
                const Workspace& workspace) const;
  // Returns how many rows of a unit need memory for sums at the same time: all rows if
  // there are several blocks of K, else the rows of a block.
  int64_t RowsOfSums(Range rows) const;
  // Returns the k_index-th block of K. Empty for k_index == num_k_blocks().
  Range BlockOfK(int64_t k_index) const;
  // Stores rows `block` of the result, over all columns of the unit, if
  // c_.stores_rows(). `sums` has their tiles, [column tile][row tile] with `row_tiles`
  // row tiles. Copies them to contiguous rows in `rows` first.
  void StoreRows(Range block,
                 Range columns,
                 const float* sums,
                 int64_t row_tiles,
                 float* rows) const;
  // Returns the size in bytes of a packed tile of A over `k` elements of K.
  int64_t TileBytesOfA(int64_t k) const {
    return kernels_.tile_rows / kernels_.panel_of_a * a_.PanelBytes(k);
  }
  // Sets `tiles` to the tiles of A in rows `block`, which are read in place or packed.
  void ReadA(Range block, Range k, std::byte* packed, ATile* tiles) const;
  // Prepares the panel `columns` of B before `num_rows` rows of A are multiplied with
  // it: packs it, or sets `b.panel.source` if the first tile packs it while it
  // multiplies. Sets `b.prefetch` to the memory that is packed next: the following
  // panel or, after the last panel of the columns `unit`, the first panel of the next
  // block of K (`next_k`). Returns the end of the prepared columns, which may be
  // several panels.
  int64_t ReadB(Range unit,
                Range columns,
                Range k,
                Range next_k,
                int64_t num_rows,
                BPanelState& b) const;
  // Multiplies a panel of B with all tiles of A's rows `rows`.
  void MultiplyPanel(const ATile* a,
                     BPanelState& b,
                     Range rows,
                     Range columns,
                     Range k,
                     float* sums) const;
  // Prefetches the memory of a tile of the result, if block `k` is the last block of K.
  void Prefetch(Range rows, Range columns, Range k) const;
  // Multiplies one tile of A with a panel of B, over a segment along K that has its own
  // factors, and adds the scaled product to `sums`.
  void MultiplySegment(const TileFunction tile,
                       const ATile& a,
                       BPanelState& b,
                       Range rows,
                       Range columns,
                       Range k,
                       PrefetchCursor& prefetch,
                       float* sums) const;
  // Multiplies one tile of A with a panel of B. Stores the tile in `sums`, or in the
  // result if this is the last block of K.
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
  // Distance between the sums of neighboring tiles, in floats; 0: all tiles share one
  // buffer.
  const int64_t sums_step_;
  const int64_t num_unit_rows_;
  const int64_t num_unit_columns_;
};

}  // namespace jax_ub
