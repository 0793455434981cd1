// Calls of every op with small integers, and what they should give.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <memory>
#include <numeric>
#include <random>
#include <string>
#include <vector>

#include "engine/call.h"

namespace jax_ub_test {

using jax_ub::Attributes;
using jax_ub::DType;
using jax_ub::Gather;
using jax_ub::Op;
using jax_ub::RankCall;
using jax_ub::Tensor;

// Arrays of f32, which exist as long as this.
class Arrays {
 public:
  explicit Arrays(int seed) : random_(seed) {}

  Tensor New(int64_t batch, int64_t rows, int64_t features, bool random = true) {
    memory_.push_back(std::make_unique<float[]>(batch * rows * features));
    Tensor tensor{DType::kF32, batch, rows, features, nullptr};
    tensor.data = reinterpret_cast<std::byte*>(memory_.back().get());
    for (int64_t i = 0; i < tensor.num_elements(); ++i) {
      memory_.back()[i] = random ? static_cast<float>(random_() % 5) - 2 : -1000;
    }
    return tensor;
  }
  Tensor Empty(int64_t batch, int64_t rows, int64_t features) {
    return New(batch, rows, features, false);
  }

 private:
  std::mt19937 random_;
  std::vector<std::unique_ptr<float[]>> memory_;
};

inline float& At(const Tensor& tensor, int64_t batch, int64_t row, int64_t feature) {
  return reinterpret_cast<float*>(tensor.At(batch, row))[feature];
}

// Sizes that are no multiples of anything.
struct Sizes {
  int64_t batch = 2;
  int64_t m = 5;
  int64_t k = 7;
  int64_t n = 3;
};

// A call of every rank: operands are filled, results are not.
inline std::vector<RankCall> MakeCalls(const Attributes& at,
                                       const Sizes& s,
                                       Arrays& arrays) {
  const int64_t all = at.num_ranks * s.m;
  std::vector<RankCall> calls(at.num_ranks);
  for (RankCall& call : calls) {
    auto& in = call.operands;
    auto& out = call.results;
    const auto add = [&](bool wanted, const Tensor& tensor) {
      if (wanted) in.push_back(tensor);
    };
    switch (at.op) {
      case Op::kAllGatherMatmul:
        in = {arrays.New(s.batch, s.m, s.k), arrays.New(1, s.k, s.n)};
        add(at.has_bias, arrays.New(1, 1, s.n));
        add(at.has_residual, arrays.New(s.batch, all, s.n));
        out = {arrays.Empty(s.batch, all, s.n)};
        if (at.return_gathered) out.push_back(arrays.Empty(s.batch, all, s.k));
        break;
      case Op::kMatmulReduceScatter:
      case Op::kMatmulAllReduce:
      case Op::kMatmul: {
        const bool scattered = at.op == Op::kMatmulReduceScatter;
        in = {arrays.New(s.batch, all, s.k), arrays.New(1, s.k, s.n)};
        add(at.has_bias, arrays.New(1, 1, s.n));
        add(at.has_residual, arrays.New(s.batch, scattered ? s.m : all, s.n));
        out = {arrays.Empty(s.batch, scattered ? s.m : all, s.n)};
        if (at.op == Op::kMatmulAllReduce) {  // what is added afterwards is replicated
          std::copy(calls[0].operands.begin() + 2, calls[0].operands.end(),
                    in.begin() + 2);
        }
        break;
      }
      case Op::kWgrad:
        in = {arrays.New(s.batch, at.gather == Gather::kX ? s.m : all, s.k),
              arrays.New(s.batch, at.gather == Gather::kDy ? s.m : all, s.n)};
        add(at.accumulate, arrays.New(1, s.k, s.n));
        out = {arrays.Empty(1, s.k, s.n)};
        break;
      case Op::kAllGather:
        in = {arrays.New(s.batch, s.m, s.k)};
        out = {arrays.Empty(s.batch, all, s.k)};
        break;
      case Op::kReduceScatter:
        in = {arrays.New(s.batch, all, s.k)};
        out = {arrays.Empty(s.batch, s.m, s.k)};
        break;
      case Op::kAllReduce:
        in = {arrays.New(1, 1, s.m * s.k)};
        out = {arrays.Empty(1, 1, s.m * s.k)};
        break;
      case Op::kBulkAllGather:
        in = {arrays.New(s.batch, all, s.n), arrays.New(1, s.k, s.n),
              arrays.New(s.batch, s.m, s.k)};
        out = {arrays.Empty(s.batch, all, s.k), arrays.Empty(s.batch, all, s.k)};
        break;
      case Op::kBulkReduceScatter:
        in = {arrays.New(s.batch, all, s.k), arrays.New(s.batch, all, s.n)};
        add(at.accumulate, arrays.New(1, s.k, s.n));
        in.push_back(arrays.New(s.batch, all, s.k));
        out = {arrays.Empty(1, s.k, s.n), arrays.Empty(s.batch, s.m, s.k)};
        break;
    }
  }
  return calls;
}

// Where row `row` of the gathered operand is.
inline float Gathered(const std::vector<RankCall>& calls,
                      size_t operand,
                      int64_t batch,
                      int64_t row,
                      int64_t feature) {
  const int64_t m = calls[0].operands[operand].rows;
  return At(calls[row / m].operands[operand], batch, row % m, feature);
}

// One element of a result, by the formula.
inline float Expected(const Attributes& at,
                      const std::vector<RankCall>& calls,
                      int rank,
                      size_t result,
                      int64_t b,
                      int64_t row,
                      int64_t column) {
  const RankCall& mine = calls[rank];
  const auto& in = mine.operands;
  float sum = 0;
  const auto scattered = [&](size_t operand) {
    const int64_t m = in[operand].rows / at.num_ranks;
    for (const RankCall& call : calls) {
      sum += At(call.operands[operand], b, rank * m + row, column);
    }
    return sum;
  };
  switch (at.op) {
    case Op::kAllGatherMatmul:
      if (result == 1) return Gathered(calls, 0, b, row, column);
      for (int64_t k = 0; k < in[0].features; ++k) {
        sum += Gathered(calls, 0, b, row, k) * At(in[1], 0, k, column);
      }
      sum *= at.scale;
      if (at.has_bias) sum += At(in[2], 0, 0, column);
      if (at.has_residual) sum += At(in[2 + at.has_bias], b, row, column);
      return sum;
    case Op::kMatmulReduceScatter:
    case Op::kMatmulAllReduce:
    case Op::kMatmul: {
      const bool local = at.op == Op::kMatmul;
      const int64_t first =
          at.op == Op::kMatmulReduceScatter ? rank * mine.results[0].rows : 0;
      for (int r = local ? rank : 0; r < (local ? rank + 1 : at.num_ranks); ++r) {
        const auto& from = calls[r].operands;
        for (int64_t k = 0; k < from[0].features; ++k) {
          sum += At(from[0], b, first + row, k) * At(from[1], 0, k, column);
        }
      }
      sum *= at.scale;
      if (at.has_bias) sum += At(in[2], 0, 0, column);
      if (at.has_residual) sum += At(in[2 + at.has_bias], b, row, column);
      return sum;
    }
    case Op::kWgrad:
    case Op::kBulkReduceScatter:
      if (result == 1) return scattered(in.size() - 1);
      for (int64_t batch = 0; batch < in[0].batch; ++batch) {
        const int64_t tokens = std::max(in[0].rows, in[1].rows);
        for (int64_t t = 0; t < tokens; ++t) {
          const bool x = at.op == Op::kWgrad && at.gather == Gather::kX;
          const bool dy = at.op == Op::kWgrad && at.gather == Gather::kDy;
          sum +=
              (x ? Gathered(calls, 0, batch, t, row) : At(in[0], batch, t, row)) *
              (dy ? Gathered(calls, 1, batch, t, column) : At(in[1], batch, t, column));
        }
      }
      return at.scale * sum + (at.accumulate ? At(in[2], 0, row, column) : 0);
    case Op::kAllGather:
      return Gathered(calls, 0, b, row, column);
    case Op::kReduceScatter:
      return scattered(0);
    case Op::kAllReduce:
      for (const RankCall& call : calls) sum += At(call.operands[0], b, row, column);
      return sum;
    case Op::kBulkAllGather:
      if (result == 1) return Gathered(calls, 2, b, row, column);
      for (int64_t n = 0; n < in[0].features; ++n) {
        sum += At(in[0], b, row, n) * At(in[1], 0, column, n);
      }
      return sum;
  }
  return sum;
}

// Elements of the results of these ranks that are not as expected.
inline int64_t NumWrong(const Attributes& at,
                        const std::vector<RankCall>& calls,
                        const std::vector<int>& ranks) {
  int64_t num_wrong = 0;
  for (const int rank : ranks) {
    for (size_t i = 0; i < calls[rank].results.size(); ++i) {
      const Tensor& result = calls[rank].results[i];
      for (int64_t b = 0; b < result.batch; ++b) {
        for (int64_t row = 0; row < result.rows; ++row) {
          for (int64_t column = 0; column < result.features; ++column) {
            num_wrong += At(result, b, row, column) !=
                         Expected(at, calls, rank, i, b, row, column);
          }
        }
      }
    }
  }
  return num_wrong;
}

// The same of all ranks.
inline int64_t NumWrong(const Attributes& at, const std::vector<RankCall>& calls) {
  std::vector<int> ranks(at.num_ranks);
  std::iota(ranks.begin(), ranks.end(), 0);
  return NumWrong(at, calls, ranks);
}

}  // namespace jax_ub_test
