// Tests how a product over segments is divided into products of plain matrices, which
// the test computes one by one.
#include "gemm/cuda/gemm_blocks.h"

#include <numeric>
#include <vector>

#include "check.h"
#include "cuda/random_arena.h"
#include "engine/segments.h"

namespace jax_ub {
namespace {

float At(
    const BlockOperand& operand, DType dtype, int64_t b, int64_t outer, int64_t k) {
  const int64_t at = b * operand.batch_stride + (operand.lines_run_along_k
                                                     ? outer * operand.line_stride + k
                                                     : k * operand.line_stride + outer);
  return Read(operand.data + at * SizeOf(dtype), dtype);
}

std::byte* At(const BlockMatrix& matrix, DType dtype, int64_t b, int64_t m, int64_t n) {
  return matrix.data +
         (b * matrix.batch_stride + m * matrix.row_stride + n) * SizeOf(dtype);
}

void Compute(const GemmProblem& problem, const GemmBlock& block) {
  for (int64_t b = 0; b < block.batch; ++b) {
    for (int64_t m = 0; m < block.m; ++m) {
      for (int64_t n = 0; n < block.n; ++n) {
        double sum = 0;
        for (const BlockTerm& term : block.terms) {
          for (int64_t k = 0; k < term.k; ++k) {
            sum += double{At(term.a, problem.a.dtype, b, m, k)} *
                   At(term.b, problem.b.dtype, b, n, k);
          }
        }
        sum *= problem.scale;
        for (size_t i = 0; i < block.addends.size(); ++i) {
          const DType dtype = problem.addends[i].dtype;
          sum += Read(At(block.addends[i], dtype, b, m, n), dtype);
        }
        Write(At(block.c, problem.c.dtype, b, m, n), problem.c.dtype,
              static_cast<float>(sum));
      }
    }
  }
}

TEST(blocks_add_up_to_the_product) {
  int64_t num_batches = 0;
  int64_t num_blocks = 0;
  for (uint64_t seed = 1; seed <= 300; ++seed) {
    Random random(seed);
    const auto gemm = MakeDeviceGemm(seed, Values::kIntegers);
    std::vector<std::byte> arena(ArenaBytes(*gemm));
    MoveInto(arena.data(), random, *gemm);
    for (const GemmBlock& block : CutIntoBlocks(gemm->problem)) {
      CHECK(static_cast<int64_t>(block.terms.size()) <= MaxTerms(gemm->problem));
      num_batches += block.batch > 1;
      ++num_blocks;
      Compute(gemm->problem, block);
    }
    const int64_t num_wrong = CountWrong(*gemm, Values::kIntegers);
    if (num_wrong != 0) CHECK_EQ(seed, uint64_t{0});
  }
  CHECK(num_batches > 0 && num_blocks > 300);
}

// Returns an array at an address that is never accessed.
Tensor Array(int64_t batch, int64_t rows, int64_t features, uintptr_t address) {
  return {DType::kBF16, batch, rows, features, reinterpret_cast<std::byte*>(address)};
}

// Returns the product of rows [begin, begin + rows) of every batch of x [batch, ., K]
// and w [K, N], whose results are the same rows of y.
GemmProblem RowsOfAll(const Tensor& x, const Tensor& y, int64_t begin, int64_t rows) {
  OperandSegments a(x.dtype);
  OperandSegments b(x.dtype);
  ResultSegments c(y.dtype);
  a.AddInner(x.features);
  b.AddInner(x.features);
  b.AddOuter(y.features);
  b.Append(KernelOf(Array(1, x.features, y.features, 1 << 20), false));
  c.AddColumns(y.features);
  for (int64_t i = 0; i < x.batch; ++i) {
    a.AddOuter(rows);
    a.Append(RowsOf(x, i, begin));
    c.AddRows(rows);
    c.Append(RowsOf(y, i, begin));
  }
  return Problem(1, std::move(a), std::move(b), std::move(c));
}

TEST(batches_that_adjoin_are_one_matrix) {
  const Tensor x = Array(4, 8, 16, 1 << 12);
  const Tensor y = Array(4, 8, 32, 1 << 16);
  GemmProblem problem = RowsOfAll(x, y, 0, 8);
  problem.addends.push_back({DType::kBF16, std::vector<AddendSegment>(4)});
  for (AddendSegment& bias : problem.addends[0].segments) {
    bias.data = reinterpret_cast<std::byte*>(64);
  }
  const std::vector<GemmBlock> blocks = CutIntoBlocks(problem);
  CHECK_EQ(blocks.size(), size_t{1});
  CHECK_EQ(blocks[0].batch, 1);
  CHECK_EQ(blocks[0].m, 32);
  CHECK_EQ(blocks[0].n, 32);
  CHECK_EQ(blocks[0].terms.size(), size_t{1});
  CHECK(blocks[0].terms[0].a.lines_run_along_k);
  CHECK_EQ(blocks[0].terms[0].a.line_stride, 16);
  CHECK(!blocks[0].terms[0].b.lines_run_along_k);
  CHECK_EQ(blocks[0].terms[0].b.line_stride, 32);
  CHECK_EQ(blocks[0].addends[0].row_stride, 0);
}

// Returns the product of two row segments of an FP8 x [., 64], which adjoin, and w. Each
// segment has scales of blocks along k, at the given addresses.
GemmProblem BlockScaled(uintptr_t first_scales, uintptr_t second_scales) {
  constexpr int64_t kRows = 8, kDepth = 64, kColumns = 32;
  const auto at = [](uintptr_t address) {
    return reinterpret_cast<std::byte*>(address);
  };
  OperandSegments a(DType::kE4M3);
  OperandSegments b(DType::kE4M3);
  ResultSegments c(DType::kBF16);
  a.AddInner(kDepth);
  b.AddInner(kDepth);
  b.AddOuter(kColumns);
  b.Append({at(1 << 20), 1, kColumns});
  c.AddColumns(kColumns);
  for (int64_t i = 0; i < 2; ++i) {
    a.AddOuter(kRows);
    a.Append({at(4096 + i * kRows * kDepth), kDepth, 1});
    c.AddRows(kRows);
    c.Append({at((2 << 20) + i * kRows * kColumns * 2), kColumns, 1});
  }
  GemmProblem problem = Problem(1, std::move(a), std::move(b), std::move(c));
  problem.a.scales = {{at(first_scales), 1, kDepth / 32, 32, 1},
                      {at(second_scales), 1, kDepth / 32, 32, 1}};
  problem.b.scales = {{at(1 << 22), 1, 1, 32, kColumns}};
  return problem;
}

TEST(segments_whose_scales_adjoin_too_are_one_matrix) {
  const std::vector<GemmBlock> blocks = CutIntoBlocks(BlockScaled(128, 128 + 8 * 2));
  CHECK_EQ(blocks.size(), size_t{1});
  CHECK_EQ(blocks[0].m, 16);
  const BlockTerm& term = blocks[0].terms[0];
  CHECK_EQ(term.a.scales.data, reinterpret_cast<std::byte*>(128));
  CHECK_EQ(term.a.scales.outer_stride, 2);
  CHECK_EQ(term.a.scales.inner_block, 32);
  CHECK_EQ(term.b.scales.data, reinterpret_cast<std::byte*>(1 << 22));
  CHECK_EQ(term.b.scales.inner_stride, 32);
}

TEST(segments_whose_scales_do_not_adjoin_are_no_batch_either) {
  const std::vector<GemmBlock> blocks = CutIntoBlocks(BlockScaled(128, 1024));
  CHECK_EQ(blocks.size(), size_t{2});
  CHECK_EQ(blocks[0].batch, 1);
  CHECK_EQ(blocks[0].m, 8);
  CHECK_EQ(blocks[1].terms[0].a.scales.data, reinterpret_cast<std::byte*>(1024));
}

TEST(terms_with_their_own_factors_are_not_merged) {
  GemmProblem problem = BlockScaled(128, 144);
  problem.a.scales = problem.b.scales = {};
  problem.a.inner_bounds = problem.b.inner_bounds = {0, 32, 64};
  const auto halves = [](OperandView& view, int64_t stride) {
    std::vector<ConstSegment> segments;
    for (ConstSegment segment : view.segments) {
      segments.push_back(segment);
      segment.data += 32 * stride;
      segments.push_back(segment);
    }
    view.segments = segments;
  };
  halves(problem.a, 1);
  halves(problem.b, 32);
  CHECK_EQ(CutIntoBlocks(problem)[0].terms.size(), size_t{1});
  const float factors[4] = {};
  problem.has_factors_by_k = true;
  for (int i = 0; i < 2; ++i) {
    // [segment along K][row segment]
    problem.factors.push_back(
        {{{&factors[i]}, {&factors[i]}, {&factors[2 + i]}, {&factors[2 + i]}}});
  }
  const std::vector<GemmBlock> blocks = CutIntoBlocks(problem);
  CHECK_EQ(blocks.size(), size_t{1});
  CHECK_EQ(blocks[0].terms.size(), size_t{2});
  for (size_t t = 0; t < 2; ++t) {
    CHECK_EQ(blocks[0].terms[t].factors.size(), size_t{2});
    for (size_t i = 0; i < 2; ++i) {
      CHECK_EQ(blocks[0].terms[t].factors[i].data, &factors[2 * t + i]);
    }
  }
}

TEST(a_block_of_scales_has_one_term) {
  GemmProblem problem = BlockScaled(128, 144);
  problem.b.inner_bounds = {0, 16, 64};
  problem.b.segments.push_back({reinterpret_cast<std::byte*>(1 << 24), 1, 32});
  problem.b.scales.push_back(problem.b.scales[0]);
  CHECK_THROWS(CutIntoBlocks(problem), "a block of scales has parts in two terms");
}

TEST(batches_equally_far_apart_are_one_strided_batch) {
  const Tensor x = Array(4, 8, 16, 1 << 12);
  const Tensor y = Array(4, 8, 32, 1 << 16);
  const std::vector<GemmBlock> blocks = CutIntoBlocks(RowsOfAll(x, y, 2, 3));
  CHECK_EQ(blocks.size(), size_t{1});
  CHECK_EQ(blocks[0].batch, 4);
  CHECK_EQ(blocks[0].m, 3);
  CHECK_EQ(blocks[0].terms[0].a.batch_stride, 8 * 16);
  CHECK_EQ(blocks[0].terms[0].b.batch_stride, 0);
  CHECK_EQ(blocks[0].c.batch_stride, 8 * 32);
}

TEST(a_batch_ends_where_the_distance_changes) {
  const Tensor x = Array(4, 8, 16, 1 << 12);
  const Tensor y = Array(4, 8, 32, 1 << 16);
  GemmProblem problem = RowsOfAll(x, y, 2, 3);
  problem.c.segments[3].data += 64;
  const std::vector<GemmBlock> blocks = CutIntoBlocks(problem);
  CHECK_EQ(blocks.size(), size_t{2});
  CHECK_EQ(blocks[0].batch, 3);
  CHECK_EQ(blocks[1].batch, 1);
  // Segments with descending addresses are no batch either.
  std::swap(problem.c.segments[0], problem.c.segments[2]);
  CHECK_EQ(CutIntoBlocks(problem).size(), size_t{3});
}

TEST(columns_of_several_results_are_a_batch_where_rows_are_not) {
  const Tensor x = Array(1, 8, 16, 1 << 12);
  GemmProblem problem = RowsOfAll(x, Array(1, 8, 30, 1 << 16), 0, 8);
  problem.c.column_bounds = {0, 10, 20, 30};
  problem.c.segments.clear();
  for (int64_t i = 0; i < 3; ++i) {
    problem.c.segments.push_back(
        {reinterpret_cast<std::byte*>((1 << 16) + i * 0x1000), 10});
  }
  const std::vector<GemmBlock> blocks = CutIntoBlocks(problem);
  CHECK_EQ(blocks.size(), size_t{1});
  CHECK_EQ(blocks[0].batch, 3);
  CHECK_EQ(blocks[0].n, 10);
  CHECK_EQ(blocks[0].terms[0].a.batch_stride, 0);
  CHECK_EQ(blocks[0].terms[0].b.batch_stride, 10);
  CHECK_EQ(blocks[0].c.batch_stride, 0x1000 / 2);
}

TEST(tokens_of_several_batches_are_terms_unless_they_adjoin) {
  const Tensor x = Array(3, 8, 16, 1 << 12);
  const Tensor dy = Array(3, 8, 32, 1 << 16);
  for (int64_t rows : {8, 5}) {
    OperandSegments a(x.dtype);
    OperandSegments b(x.dtype);
    ResultSegments c(DType::kF32);
    a.AddOuter(16);
    b.AddOuter(32);
    c.AddRows(16);
    c.AddColumns(32);
    c.Append(RowsOf(Array(1, 16, 32, 1 << 20), 0, 0));
    for (int64_t i = 0; i < 3; ++i) {
      a.AddInner(rows);
      a.Append(ColumnsOf(x, i, 0));
      b.AddInner(rows);
      b.Append(ColumnsOf(dy, i, 0));
    }
    const GemmProblem problem = Problem(1, std::move(a), std::move(b), std::move(c));
    const std::vector<GemmBlock> blocks = CutIntoBlocks(problem);
    CHECK_EQ(blocks.size(), size_t{1});
    CHECK_EQ(blocks[0].terms.size(), size_t(rows == 8 ? 1 : 3));
    CHECK_EQ(MaxTerms(problem), 3);
    CHECK(!blocks[0].terms[0].a.lines_run_along_k);
    CHECK_EQ(blocks[0].terms[0].k, rows == 8 ? 24 : 5);
  }
}

// The number of products must not depend on the addresses that XLA assigns.
TEST(single_rows_of_several_tensors_are_terms_at_any_address) {
  const Tensor dy = Array(2, 1, 16, 1 << 12);
  const Tensor kernels = Array(2, 16, 32, 1 << 16);
  OperandSegments a(dy.dtype);
  OperandSegments b(dy.dtype);
  ResultSegments c(DType::kF32);
  a.AddOuter(1);
  b.AddOuter(32);
  c.AddRows(1);
  c.AddColumns(32);
  c.Append(RowsOf(Array(1, 1, 32, 1 << 20), 0, 0));
  for (int64_t i = 0; i < 2; ++i) {
    a.AddInner(16);
    a.Append(RowsOf(dy, i, 0));
    b.AddInner(16);
    b.Append(ColumnsOf(kernels, i, 0));
  }
  const std::vector<GemmBlock> blocks =
      CutIntoBlocks(Problem(1, std::move(a), std::move(b), std::move(c)));
  CHECK_EQ(blocks.size(), size_t{1});
  CHECK_EQ(blocks[0].terms.size(), size_t{2});
}

TEST(empty_products_have_no_blocks_and_empty_sums_no_terms) {
  const auto empty = [](int64_t rows, int64_t k, int64_t columns) {
    return RowsOfAll(Array(2, rows, k, 1 << 12), Array(2, rows, columns, 1 << 16), 0,
                     rows);
  };
  CHECK(CutIntoBlocks(empty(0, 4, 4)).empty());
  CHECK(CutIntoBlocks(empty(4, 4, 0)).empty());
  const std::vector<GemmBlock> blocks = CutIntoBlocks(empty(4, 0, 4));
  CHECK_EQ(blocks.size(), size_t{1});
  CHECK(blocks[0].terms.empty());
}

TEST(views_that_a_gpu_cannot_compute_are_refused) {
  const Tensor x = Array(1, 8, 16, 1 << 12);
  GemmProblem problem = RowsOfAll(x, Array(1, 8, 32, 1 << 16), 0, 8);
  problem.c.num_replicas = 2;
  problem.c.segments.push_back(problem.c.segments[0]);
  CHECK_THROWS(CutIntoBlocks(problem), "C has 2 replicas, a GPU stores one");
  problem = RowsOfAll(x, Array(1, 8, 32, 1 << 16), 0, 8);
  problem.a.segments[0].outer_stride = 7;
  CHECK_THROWS(CutIntoBlocks(problem), "lines overlap: strides 7 and 1 of [8, 16]");
  problem.n = 31;
  CHECK_THROWS(CutIntoBlocks(problem), "B's N bounds {0, 32} must run from 0 to 31");
}

}  // namespace
}  // namespace jax_ub

CHECK_MAIN()
