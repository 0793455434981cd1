// Cuts a product over segments into as few products of plain matrices as its addresses
// allow: what a library that knows matrices and strided batches can compute.
//
// Every dimension is cut wherever a view begins a new segment. Neighbours that adjoin in
// all views become one again; neighbours of one size, equally far apart in every view,
// become a batch (rows, or else columns). Cuts of the contracted dimension become terms:
//
//   C = sum over terms of A[term] * B[term]
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "gemm/gemm.h"

namespace jax_ub {

// A [m, k] or B [k, n]. Lines are contiguous, `line_stride` elements apart, and run along k
// or along the dimension that survives the product.
struct BlockOperand {
  const std::byte* data = nullptr;
  bool lines_run_along_k = true;
  int64_t line_stride = 0;
  int64_t batch_stride = 0;  // in elements; 0: the whole batch shares it
};

struct BlockTerm {
  int64_t k = 0;
  BlockOperand a;
  BlockOperand b;
};

// The result [m, n] or an addend: rows of contiguous columns.
struct BlockMatrix {
  std::byte* data = nullptr;
  int64_t row_stride = 0;
  int64_t batch_stride = 0;
};

struct GemmBlock {
  int64_t batch = 1;
  int64_t m = 0;
  int64_t n = 0;
  std::vector<BlockTerm> terms;  // none where nothing is contracted
  BlockMatrix c;
  std::vector<BlockMatrix> addends;  // parallel to GemmProblem::addends
};

// In the order of the result's rows. Throws std::invalid_argument where views and sizes
// disagree or the result has replicas.
std::vector<GemmBlock> CutIntoBlocks(const GemmProblem& problem);

// Terms of each block at most: as many as there are if nothing adjoins.
int64_t MaxTerms(const GemmProblem& problem);

}  // namespace jax_ub
