#include "gemm/cuda/gemm_blocks.h"

#include <algorithm>
#include <array>
#include <stdexcept>
#include <string>

namespace jax_ub {

namespace {

enum Axis { kRows, kColumns, kInner };

// An interval of M, N or K that crosses no border between segments, and its position in
// the two matrices that have this dimension.
struct Cut {
  int64_t size = 0;
  std::array<size_t, 2> segment;
  std::array<int64_t, 2> offset;  // in elements, from the begin of the segment
};

// Merges two lists of bounds, and returns the intervals between neighboring bounds.
std::vector<Cut> Refine(const std::vector<int64_t>& first,
                        const std::vector<int64_t>& second) {
  std::vector<int64_t> bounds;
  std::set_union(first.begin(), first.end(), second.begin(), second.end(),
                 std::back_inserter(bounds));
  bounds.erase(std::unique(bounds.begin(), bounds.end()), bounds.end());
  std::vector<Cut> cuts;
  for (size_t i = 0; i + 1 < bounds.size(); ++i) {
    Cut cut;
    cut.size = bounds[i + 1] - bounds[i];
    for (int view = 0; view < 2; ++view) {
      const std::vector<int64_t>& own = view == 0 ? first : second;
      const auto next = std::upper_bound(own.begin(), own.end(), bounds[i]);
      cut.segment[view] = next - own.begin() - 1;
      cut.offset[view] = bounds[i] - *(next - 1);
    }
    cuts.push_back(cut);
  }
  return cuts;
}

// Address and strides of one block of a view: interval i of its first dimension and
// interval j of its second one. Strides are in elements. In a view of scales, `repeats`
// elements of the operand share a scale, and a stride is the distance between scales.
struct Spot {
  const std::byte* data = nullptr;
  std::array<int64_t, 2> strides;
  std::array<int64_t, 2> repeats = {1, 1};
};

// What a view describes.
enum class Content { kOperand, kMatrix, kFactors, kScales };

// The blocks of one matrix. Each of its dimensions is divided into intervals, and block
// (i, j) has the rows of interval i and the columns of interval j.
struct Table {
  Content content;
  std::array<Axis, 2> axes;
  int64_t element_bytes = 0;
  std::array<size_t, 2> size;
  std::vector<Spot> spots;  // [i][j]

  const Spot& At(size_t i, size_t j) const { return spots[i * size[1] + j]; }
  int Side(Axis axis) const { return axes[0] == axis ? 0 : axes[1] == axis ? 1 : -1; }
  // Returns the block with index `along` in dimension `side` and index `across` in the
  // other dimension.
  const Spot& Along(int side, size_t along, size_t across) const {
    return side == 0 ? At(along, across) : At(across, along);
  }

  // Removes all blocks except those whose index in dimension `side` is in `kept`.
  void Keep(int side, const std::vector<size_t>& kept) {
    std::vector<Spot> left;
    for (size_t i = 0; i < (side == 0 ? kept.size() : size[0]); ++i) {
      for (size_t j = 0; j < (side == 1 ? kept.size() : size[1]); ++j) {
        left.push_back(At(side == 0 ? kept[i] : i, side == 1 ? kept[j] : j));
      }
    }
    size[side] = kept.size();
    spots = std::move(left);
  }
};

// `count` consecutive intervals of the result's rows or columns, from number `first`
// on. One batched GEMM computes all their blocks.
struct Run {
  size_t first = 0;
  int64_t count = 1;
};

class Grid {
 public:
  explicit Grid(const GemmProblem& problem)
      : cuts_{Refine(problem.a.outer_bounds, problem.c.row_bounds),
              Refine(problem.b.outer_bounds, problem.c.column_bounds),
              Refine(problem.a.inner_bounds, problem.b.inner_bounds)},
        num_rows_(problem.m),
        has_factors_by_k_(problem.has_factors_by_k),
        num_factors_(problem.factors.size()) {
    AddOperand(problem.a, kRows, 0);
    AddOperand(problem.b, kColumns, 1);
    AddMatrix(problem.c, problem.c.dtype, problem.c.segments);
    for (const AddendView& addend : problem.addends) {
      AddMatrix(problem.c, addend.dtype, addend.segments);
    }
    first_factor_ = tables_.size();
    const size_t num_parts =
        has_factors_by_k_ ? problem.a.inner_bounds.size() - 1 : size_t{1};
    for (size_t part = 0; part < num_parts; ++part) {
      for (const FactorView& factor : problem.factors) {
        AddFactor(problem.c, factor, part);
      }
    }
    scales_of_a_ = AddScales(problem.a, kRows, 0);
    scales_of_b_ = AddScales(problem.b, kColumns, 1);
    for (Axis axis : {kRows, kColumns, kInner}) Merge(axis);
  }

  std::vector<GemmBlock> Blocks() const {
    std::vector<Run> rows = Runs(kRows);
    std::vector<Run> columns = Runs(kColumns);
    const bool rows_are_batched = rows.size() < cuts_[kRows].size();
    (rows_are_batched ? columns : rows) =
        Singles((rows_are_batched ? cuts_[kColumns] : cuts_[kRows]).size());
    std::vector<GemmBlock> blocks;
    for (const Run& row : rows) {
      for (const Run& column : columns) blocks.push_back(Block(row, column));
    }
    return blocks;
  }

 private:
  // Adds a table with the addresses of an array's blocks. The cuts divide its dimensions
  // into intervals. spot_of(i, j) returns the address and strides of the block of
  // interval i of the first dimension and interval j of the second one.
  template <typename SpotOf>
  void AddTable(Content content,
                Axis first,
                Axis second,
                int64_t element_bytes,
                const SpotOf& spot_of) {
    Table table{content,
                {first, second},
                element_bytes,
                {cuts_[first].size(), cuts_[second].size()},
                {}};
    for (const Cut& i : cuts_[first]) {
      for (const Cut& j : cuts_[second]) table.spots.push_back(spot_of(i, j));
    }
    tables_.push_back(std::move(table));
  }

  void AddOperand(const OperandView& view, Axis outer, int inner_view) {
    const int64_t bytes = SizeOf(view.dtype);
    const size_t row_length = view.inner_bounds.size() - 1;
    const auto spot_of = [&](const Cut& o, const Cut& k) -> Spot {
      const ConstSegment& segment =
          view.segments[o.segment[0] * row_length + k.segment[inner_view]];
      const int64_t offset = o.offset[0] * segment.outer_stride +
                             k.offset[inner_view] * segment.inner_stride;
      return {segment.data + offset * bytes,
              {segment.outer_stride, segment.inner_stride}};
    };
    AddTable(Content::kOperand, outer, kInner, bytes, spot_of);
  }

  template <typename Segment>
  void AddMatrix(const ResultView& like,
                 DType dtype,
                 const std::vector<Segment>& segments) {
    const int64_t bytes = SizeOf(dtype);
    const size_t row_length = like.column_bounds.size() - 1;
    const auto spot_of = [&](const Cut& r, const Cut& c) -> Spot {
      const Segment& segment = segments[r.segment[1] * row_length + c.segment[1]];
      const int64_t offset = r.offset[1] * segment.row_stride + c.offset[1];
      return {segment.data + offset * bytes, {segment.row_stride, 1}};
    };
    AddTable(Content::kMatrix, kRows, kColumns, bytes, spot_of);
  }

  // Adds a table with the factors of each block of the result. If each segment along K
  // has its own factors, these are the factors of segment number `part`.
  void AddFactor(const ResultView& like, const FactorView& factor, size_t part) {
    const size_t row_length = like.column_bounds.size() - 1;
    const size_t first = part * (like.row_bounds.size() - 1) * row_length;
    const auto spot_of = [&](const Cut& r, const Cut& c) -> Spot {
      const FactorSegment& segment =
          factor.segments[first + r.segment[1] * row_length + c.segment[1]];
      const float* const data = segment.data + r.offset[1] * segment.row_stride +
                                c.offset[1] * segment.column_stride;
      return {reinterpret_cast<const std::byte*>(data),
              {segment.row_stride, segment.column_stride}};
    };
    AddTable(Content::kFactors, kRows, kColumns, sizeof(float), spot_of);
  }

  // Adds a table of an operand's scales, if the operand has any. Returns the index of
  // the table or kNoTable.
  size_t AddScales(const OperandView& view, Axis outer, int inner_view) {
    if (view.scales.empty()) return kNoTable;
    const int64_t bytes = SizeOf(view.scale_dtype);
    const size_t row_length = view.inner_bounds.size() - 1;
    const auto spot_of = [&](const Cut& o, const Cut& k) -> Spot {
      const ScaleSegment& scales =
          view.scales[o.segment[0] * row_length + k.segment[inner_view]];
      if (o.offset[0] % scales.outer_block != 0 ||
          k.offset[inner_view] % scales.inner_block != 0) {
        throw std::invalid_argument("GEMM: a block of scales has parts in two terms");
      }
      const int64_t offset =
          o.offset[0] / scales.outer_block * scales.outer_stride +
          k.offset[inner_view] / scales.inner_block * scales.inner_stride;
      return {scales.data + offset * bytes,
              {scales.outer_stride, scales.inner_stride},
              {scales.outer_block, scales.inner_block}};
    };
    AddTable(Content::kScales, outer, kInner, bytes, spot_of);
    return tables_.size() - 1;
  }

  // Returns whether blocks i and i + 1 along `axis` have equal strides and satisfy
  // `test`, in every table that has this axis. A table has the blocks of one operand,
  // result, factor or array of scales.
  //
  // For two neighboring blocks `here` and `next`, it calls
  // test(table, here, next, side), where table.axes[side] is `axis`.
  template <typename Test>
  bool Everywhere(Axis axis, size_t i, Test test) const {
    for (size_t t = 0; t < tables_.size(); ++t) {
      const Table& table = tables_[t];
      const int side = table.Side(axis);
      if (side < 0) continue;
      for (size_t across = 0; across < table.size[1 - side]; ++across) {
        const Spot& here = table.Along(side, i, across);
        const Spot& next = table.Along(side, i + 1, across);
        if (here.strides != next.strides || here.repeats != next.repeats ||
            !test(table, here, next, side)) {
          return false;
        }
      }
    }
    return true;
  }

  void Merge(Axis axis) {
    std::vector<Cut>& cuts = cuts_[axis];
    // Terms of a single row are not merged: rows of different tensors may be adjacent
    // by chance in one run only, and XLA can update a captured graph only if all runs
    // have the same GEMMs. Terms with separate factors are not merged, either.
    if (axis == kInner && (num_rows_ == 1 || has_factors_by_k_)) return;
    std::vector<size_t> kept;
    std::vector<Cut> merged;
    for (size_t i = 0; i < cuts.size(); ++i) {
      const auto adjoins = [&](const Table& table, const Spot& here, const Spot& next,
                               int side) {
        const int64_t repeats = here.repeats[side];
        if (cuts[i - 1].size % repeats != 0) return false;
        return next.data == here.data + cuts[i - 1].size / repeats *
                                            here.strides[side] * table.element_bytes;
      };
      if (i > 0 && Everywhere(axis, i - 1, adjoins)) {
        merged.back().size += cuts[i].size;
      } else {
        kept.push_back(i);
        merged.push_back(cuts[i]);
      }
    }
    cuts = std::move(merged);
    for (Table& table : tables_) {
      if (table.Side(axis) >= 0) table.Keep(table.Side(axis), kept);
    }
  }

  static int64_t Distance(const Spot& here, const Spot& next) {
    return static_cast<int64_t>(reinterpret_cast<uintptr_t>(next.data) -
                                reinterpret_cast<uintptr_t>(here.data));
  }

  // Returns whether interval i + 1 can be multiplied in the same strided-batch GEMM as
  // interval i. If the batch already has several intervals (`has_begun`), the distance
  // in memory must equal the distance between these intervals.
  bool Continues(Axis axis, size_t i, bool has_begun) const {
    if (cuts_[axis][i].size != cuts_[axis][i + 1].size) return false;
    return Everywhere(
        axis, i, [&](const Table& table, const Spot& here, const Spot& next, int side) {
          if (table.content == Content::kScales) return false;
          const int64_t distance = Distance(here, next);
          if (distance < 0 || distance % table.element_bytes != 0) return false;
          if (table.content == Content::kFactors && distance != 0) return false;
          if (!has_begun) return true;
          const int64_t index = &here - table.spots.data();
          const int64_t step = side == 0 ? static_cast<int64_t>(table.size[1]) : 1;
          return Distance(table.spots[index - step], here) == distance;
        });
  }

  std::vector<Run> Runs(Axis axis) const {
    std::vector<Run> runs;
    for (size_t i = 0; i < cuts_[axis].size(); ++i) {
      if (i > 0 && Continues(axis, i - 1, runs.back().count > 1)) {
        ++runs.back().count;
      } else {
        runs.push_back({i, 1});
      }
    }
    return runs;
  }

  static std::vector<Run> Singles(size_t size) {
    std::vector<Run> runs(size);
    for (size_t i = 0; i < size; ++i) runs[i].first = i;
    return runs;
  }

  GemmBlock Block(const Run& row, const Run& column) const {
    GemmBlock block;
    block.batch = std::max(row.count, column.count);
    block.m = cuts_[kRows][row.first].size;
    block.n = cuts_[kColumns][column.first].size;
    for (size_t p = 0; p < cuts_[kInner].size(); ++p) {
      const int64_t k = cuts_[kInner][p].size;
      block.terms.push_back({k, Operand(tables_[0], row, p, block.m, k),
                             Operand(tables_[1], column, p, block.n, k)});
      block.terms.back().a.scales = ScalesOf(scales_of_a_, row, p);
      block.terms.back().b.scales = ScalesOf(scales_of_b_, column, p);
      block.terms.back().factors = FactorsOf(row, column, p);
    }
    block.c = Matrix(tables_[2], row, column);
    for (size_t t = 3; t < tables_.size(); ++t) {
      if (tables_[t].content == Content::kMatrix) {
        block.addends.push_back(Matrix(tables_[t], row, column));
      }
    }
    return block;
  }

  std::vector<FactorSegment> FactorsOf(const Run& row,
                                       const Run& column,
                                       size_t p) const {
    const size_t part = has_factors_by_k_ ? cuts_[kInner][p].segment[0] : 0;
    std::vector<FactorSegment> factors;
    for (size_t i = 0; i < num_factors_; ++i) {
      const Table& table = tables_[first_factor_ + part * num_factors_ + i];
      const Spot& spot = table.At(row.first, column.first);
      factors.push_back({reinterpret_cast<const float*>(spot.data), spot.strides[0],
                         spot.strides[1]});
    }
    return factors;
  }

  ScaleSegment ScalesOf(size_t table, const Run& run, size_t p) const {
    if (table == kNoTable) return {};
    const Spot& spot = tables_[table].At(run.first, p);
    return {spot.data, spot.repeats[0], spot.strides[0], spot.repeats[1],
            spot.strides[1]};
  }

  static BlockOperand Operand(
      const Table& table, const Run& run, size_t p, int64_t outer, int64_t k) {
    const Spot& spot = table.At(run.first, p);
    const auto [outer_stride, inner_stride] = spot.strides;
    BlockOperand operand;
    operand.data = spot.data;
    // The stride of a matrix with a single line (row or column) has no meaning, so any
    // stride is accepted.
    if (inner_stride == 1 && (outer_stride >= k || outer == 1)) {
      operand.line_stride = std::max(outer_stride, k);
    } else if (outer_stride == 1 && (inner_stride >= outer || k == 1)) {
      operand.lines_run_along_k = false;
      operand.line_stride = std::max(inner_stride, outer);
    } else {
      throw std::invalid_argument(
          "GEMM: an operand's lines overlap: strides " + std::to_string(outer_stride) +
          " and " + std::to_string(inner_stride) + " of [" + std::to_string(outer) +
          ", " + std::to_string(k) + "]");
    }
    if (run.count > 1) {
      operand.batch_stride =
          Distance(spot, table.At(run.first + 1, p)) / table.element_bytes;
    }
    return operand;
  }

  static BlockMatrix Matrix(const Table& table, const Run& row, const Run& column) {
    const Spot& spot = table.At(row.first, column.first);
    BlockMatrix matrix{const_cast<std::byte*>(spot.data), spot.strides[0], 0};
    if (row.count > 1 || column.count > 1) {
      const Spot& next = table.At(row.first + (row.count > 1 ? 1 : 0),
                                  column.first + (column.count > 1 ? 1 : 0));
      matrix.batch_stride = Distance(spot, next) / table.element_bytes;
    }
    return matrix;
  }

  static constexpr size_t kNoTable = -1;

  std::array<std::vector<Cut>, 3> cuts_;
  const int64_t num_rows_;
  const bool has_factors_by_k_;
  const size_t num_factors_;
  size_t first_factor_ = 0;  // index of the table of the first factor of the first part
  std::vector<Table> tables_;  // A, B, C, addends, factors, scales
  size_t scales_of_a_ = kNoTable;
  size_t scales_of_b_ = kNoTable;
};

}  // namespace

std::vector<GemmBlock> CutIntoBlocks(const GemmProblem& problem) {
  CheckProblem(problem);
  if (problem.c.num_replicas != 1) {
    throw std::invalid_argument("GEMM: C has " +
                                std::to_string(problem.c.num_replicas) +
                                " replicas, a GPU stores one");
  }
  return Grid(problem).Blocks();
}

int64_t MaxTerms(const GemmProblem& problem) {
  return static_cast<int64_t>(
      Refine(problem.a.inner_bounds, problem.b.inner_bounds).size());
}

}  // namespace jax_ub
