// Converts a product over segmented operands to products of plain matrices or strided
// batches, which a library such as cuBLASLt can compute. The number of products is as
// small as the addresses of the segments allow.
//
// Each dimension is cut where any view begins a new segment. Intervals that are
// adjacent in memory in all views are merged again. Consecutive intervals of equal size
// with a constant distance in every view, and the same factors, become a batch, along
// rows or else along columns. Operands whose elements have scales form no batches. Each
// interval of the contracted dimension becomes a term:
//
//   C = sum over terms of A[term] * B[term]
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "gemm/gemm.h"

namespace jax_ub {

// A matrix in memory: operand A [m, k] or B [k, n] of one term. Either its rows or its
// columns ("lines") are contiguous.
struct BlockOperand {
  const std::byte* data = nullptr;
  bool lines_run_along_k = true;
  int64_t line_stride = 0;   // distance of neighboring lines, in elements
  int64_t batch_stride = 0;  // in elements; 0: the same matrix for the whole batch
  ScaleSegment scales = {};  // null data: none
};

// One summand of a block: the product of A and B over an interval of K of length `k`.
struct BlockTerm {
  int64_t k = 0;
  BlockOperand a;
  BlockOperand b;
  std::vector<FactorSegment> factors = {};  // parallel to GemmProblem::factors
};

// The result or an addend [m, n], whose rows are contiguous. Strides are in elements.
struct BlockMatrix {
  std::byte* data = nullptr;
  int64_t row_stride = 0;
  int64_t batch_stride = 0;
};

struct GemmBlock {
  int64_t batch = 1;
  int64_t m = 0;
  int64_t n = 0;
  std::vector<BlockTerm> terms;  // empty if K = 0
  BlockMatrix c;
  std::vector<BlockMatrix> addends;  // parallel to GemmProblem::addends
};

// Divides a product into blocks, each of which is a plain or a batched GEMM. Returns
// the blocks in the order of the result's rows. Throws std::invalid_argument if views
// and sizes do not match, or if the result has several replicas.
std::vector<GemmBlock> CutIntoBlocks(const GemmProblem& problem);

// Returns the largest number of terms (products over one interval of K) that a block
// can have. Intervals whose data is contiguous in memory are merged, so the number of
// terms depends on the addresses. The largest number is that without merging.
int64_t MaxTerms(const GemmProblem& problem);

}  // namespace jax_ub
