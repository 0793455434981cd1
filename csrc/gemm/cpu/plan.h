// How a product is cut into units, and each unit into blocks that fit the caches.
#pragma once

#include <cstdint>
#include <vector>

#include "gemm/cpu/isa.h"
#include "gemm/cpu/operand.h"
#include "gemm/cpu/result.h"
#include "gemm/gemm.h"

namespace jax_ub {

// PlanGemm with kernels of one's own choice.
std::unique_ptr<GemmPlan> PlanCpuGemm(GemmProblem problem,
                                      const KernelSet& kernels,
                                      const Workers& workers);

// EstimateGemmUs with these kernels.
double EstimateCpuGemmUs(const GemmProblem& problem, const KernelSet& kernels);

// Sizes in elements. A unit computes unit_rows x unit_columns of C in blocks of K, each
// between two of k_bounds; in each, it multiplies block_rows of A with one panel of B
// after the other, tile by tile.
struct GemmBlocking {
  int64_t unit_rows = 0;
  int64_t unit_columns = 0;
  std::vector<int64_t> k_bounds;
  int64_t k_block = 0;  // the longest
  int64_t block_rows = 0;

  int64_t num_k_blocks() const { return static_cast<int64_t>(k_bounds.size()) - 1; }
};

GemmBlocking ChooseBlocking(const GemmProblem& problem,
                            const KernelSet& kernels,
                            int num_workers);

class TiledPlan : public GemmPlan {
 public:
  TiledPlan(GemmProblem problem, const KernelSet& kernels, const Workers& workers);

  int64_t num_units() const override { return num_unit_rows_ * num_unit_columns_; }
  void Run(int64_t unit, Scratch& scratch) const override;

 private:
  // The parts of a unit's workspace.
  struct Workspace {
    std::byte* packed_a;  // [row tile of a block][panel]
    std::byte* packed_b;  // [column tile of the unit, or of a group][panel]
    float* sums;          // [column tile of the unit][row tile of the unit][tile]
    float* rows;  // [row of a tile][column of the unit], where they are stored whole
  };

  // A panel of B on its way through the tiles. It has a source until one has packed it.
  struct BPanelState {
    BPanel panel;
    PrefetchCursor prefetch = {};  // the panel after it
    bool prefetch_in_packing_tile =
        false;  // the tile that packs asks for `upcoming` too
  };

  // One block of K of a unit: C[rows, columns] (+)= A[rows, k] B[k, columns].
  void RunBlock(Range rows,
                Range columns,
                int64_t k_index,
                const Workspace& workspace) const;
  // How many of a unit's rows have sums at the same time: those of a block if nothing
  // is added to them, all if another block of K follows.
  int64_t RowsOfSums(Range rows) const;
  // The k_index-th block of K; empty behind the last one.
  Range BlockOfK(int64_t k_index) const;
  // Stores the finished tiles of rows `block` of a result that takes whole rows; a
  // column tile of `sums` begins `row_tiles` tiles after the one before.
  void StoreRows(Range block,
                 Range columns,
                 const float* sums,
                 int64_t row_tiles,
                 float* rows) const;
  // What a packed tile of A takes over `k` elements of K.
  int64_t TileBytesOfA(int64_t k) const {
    return kernels_.tile_rows / kernels_.panel_of_a * a_.PanelBytes(k);
  }
  // Packs or finds the tiles of A in rows `block`.
  void ReadA(Range block, Range k, std::byte* packed, ATile* tiles) const;
  // Prepares a panel, `columns` of those of `unit`, for num_rows of A that it meets
  // first: packs it, or finds it for a tile that packs, and says which memory comes
  // next: behind the unit's last columns that of the block next_k. Returns where the
  // columns end that need no preparation any more.
  int64_t ReadB(Range unit,
                Range columns,
                Range k,
                Range next_k,
                int64_t num_rows,
                BPanelState& b) const;
  // A panel of B with all tiles of A's rows `rows`.
  void MultiplyPanel(const ATile* a,
                     BPanelState& b,
                     Range rows,
                     Range columns,
                     Range k,
                     float* sums) const;
  // Asks for the memory of a tile of the result, if this block of K is the last.
  void Prefetch(Range rows, Range columns, Range k) const;
  // Into `sums`, or with the last block of K into the result.
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
  const int64_t
      sums_step_;  // from a tile's sums to the next one's; 0: one place for all
  const int64_t num_unit_rows_;
  const int64_t num_unit_columns_;
};

}  // namespace jax_ub
