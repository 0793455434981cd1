// Makes calls of every op on arrays of small integers, and computes the expected
// results.
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
#include "matrix.h"

namespace jax_ub_test {

using jax_ub::CallAttributes;
using jax_ub::DType;
using jax_ub::Gather;
using jax_ub::Op;
using jax_ub::RankCall;
using jax_ub::Tensor;

// Allocates f32 arrays, and frees them when it is destroyed.
class Arrays {
 public:
  explicit Arrays(int seed) : random_(seed) {}

  Tensor New(int64_t batch, int64_t rows, int64_t features, bool random = true) {
    memory_.push_back(std::make_unique<float[]>(batch * rows * features));
    Tensor tensor{DType::kF32, batch, rows, features, nullptr};
    tensor.data = reinterpret_cast<std::byte*>(memory_.back().get());
    float* const values = memory_.back().get();
    for (int64_t i = 0, n = tensor.num_elements(); i < n; ++i) {
      values[i] = random ? static_cast<float>(random_() % 5) - 2 : -1000;
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

// The default sizes of a call's arrays, none of which is a multiple of a block or
// vector.
struct Sizes {
  int64_t batch = 2;
  int64_t m = 5;
  int64_t k = 7;
  int64_t n = 3;
  int64_t step = 1;  // what each further kernel, pair or output has more
};

// Returns a call for each rank, with random operands and unset results. Each further
// kernel, pair or output has `step` more features than the previous one.
inline std::vector<RankCall> MakeCalls(const CallAttributes& at,
                                       const Sizes& s,
                                       Arrays& arrays) {
  const int64_t all = at.num_ranks * s.m;
  std::vector<RankCall> calls(at.num_ranks);
  for (RankCall& call : calls) {
    auto& in = call.operands;
    auto& out = call.results;
    const auto kernel = [&](int64_t k, int64_t n) {
      return at.rhs_transposed ? arrays.New(1, n, k) : arrays.New(1, k, n);
    };
    const auto for_each = [&](bool wanted, const auto& add) {
      for (int i = 0; wanted && i < at.num_kernels; ++i) add(i);
    };
    switch (at.op) {
      case Op::kAllGatherMatmul:
        in = {arrays.New(s.batch, s.m, s.k)};
        for_each(true, [&](int i) { in.push_back(kernel(s.k, s.n + i * s.step)); });
        for_each(at.has_bias,
                 [&](int i) { in.push_back(arrays.New(1, 1, s.n + i * s.step)); });
        for_each(at.has_residual, [&](int i) {
          in.push_back(arrays.New(s.batch, all, s.n + i * s.step));
        });
        for_each(true, [&](int i) {
          out.push_back(arrays.Empty(s.batch, all, s.n + i * s.step));
        });
        if (at.return_gathered) out.push_back(arrays.Empty(s.batch, all, s.k));
        break;
      case Op::kMatmulReduceScatter:
      case Op::kMatmulAllReduce:
      case Op::kMatmul: {
        const bool scattered = at.op == Op::kMatmulReduceScatter;
        for_each(true, [&](int i) {
          in.push_back(arrays.New(s.batch, all, s.k + i * s.step));
        });
        for_each(true, [&](int i) { in.push_back(kernel(s.k + i * s.step, s.n)); });
        if (at.has_bias) in.push_back(arrays.New(1, 1, s.n));
        if (at.has_residual) {
          in.push_back(arrays.New(s.batch, scattered ? s.m : all, s.n));
        }
        out = {arrays.Empty(s.batch, scattered ? s.m : all, s.n)};
        if (at.op == Op::kMatmulAllReduce) {  // what is added afterwards is replicated
          const auto first = 2 * at.num_kernels;
          std::copy(calls[0].operands.begin() + first, calls[0].operands.end(),
                    in.begin() + first);
        }
        break;
      }
      case Op::kWgrad: {
        const int64_t dy_rows = at.gather == Gather::kDy ? s.m : all;
        in = {arrays.New(s.batch, at.gather == Gather::kX ? s.m : all, s.k)};
        for_each(true, [&](int i) {
          in.push_back(arrays.New(s.batch, dy_rows, s.n + i * s.step));
        });
        for_each(at.accumulate,
                 [&](int i) { in.push_back(arrays.New(1, s.k, s.n + i * s.step)); });
        for_each(true,
                 [&](int i) { out.push_back(arrays.Empty(1, s.k, s.n + i * s.step)); });
        break;
      }
      case Op::kAllGather:
        in = {arrays.New(s.batch, s.m, s.k)};
        out = {arrays.Empty(s.batch, all, s.k)};
        break;
      case Op::kReduceScatter:
        in = {arrays.New(s.batch, all, s.k)};
        out = {arrays.Empty(s.batch, s.m, s.k)};
        break;
      case Op::kAllReduce: {
        const int64_t rows = at.has_bias ? all : s.m * s.k;
        const int64_t width = at.has_bias ? s.k : 1;
        in = {arrays.New(1, rows, width)};
        if (at.has_bias) in.push_back(arrays.New(1, 1, width));
        if (at.has_residual) in.push_back(arrays.New(1, rows, width));
        out = {arrays.Empty(1, rows, width)};
        std::copy(calls[0].operands.begin() + 1, calls[0].operands.end(),
                  in.begin() + 1);
        break;
      }
      case Op::kBulkAllGather:
        for_each(true, [&](int i) {
          in.push_back(arrays.New(s.batch, all, s.n + i * s.step));
        });
        for_each(true,
                 [&](int i) { in.push_back(arrays.New(1, s.k, s.n + i * s.step)); });
        in.push_back(arrays.New(s.batch, s.m, s.k));
        out = {arrays.Empty(s.batch, all, s.k), arrays.Empty(s.batch, all, s.k)};
        break;
      case Op::kBulkReduceScatter:
        in = {arrays.New(s.batch, all, s.k)};
        for_each(true, [&](int i) {
          in.push_back(arrays.New(s.batch, all, s.n + i * s.step));
        });
        for_each(at.accumulate,
                 [&](int i) { in.push_back(arrays.New(1, s.k, s.n + i * s.step)); });
        in.push_back(arrays.New(s.batch, all, s.k));
        for_each(true,
                 [&](int i) { out.push_back(arrays.Empty(1, s.k, s.n + i * s.step)); });
        out.push_back(arrays.Empty(s.batch, s.m, s.k));
        break;
    }
  }
  return calls;
}

// Copies `num_rows` rows of a batch element of a tensor.
inline Matrix CopyRows(const Tensor& tensor,
                       int64_t batch,
                       int64_t first_row,
                       int64_t num_rows) {
  const auto* const from = reinterpret_cast<const float*>(tensor.At(batch, first_row));
  return {num_rows, tensor.features, {from, from + num_rows * tensor.features}};
}
inline Matrix Copy(const Tensor& tensor, int64_t batch = 0) {
  return CopyRows(tensor, batch, 0, tensor.rows);
}

// Returns a batch element of the all-gathered operand.
inline Matrix Gathered(const std::vector<RankCall>& calls,
                       size_t operand,
                       int64_t batch) {
  Matrix all{0, calls[0].operands[operand].features};
  for (const RankCall& call : calls) {
    const Matrix shard = Copy(call.operands[operand], batch);
    all.rows += shard.rows;
    all.values.insert(all.values.end(), shard.values.begin(), shard.values.end());
  }
  return all;
}

// Returns the expected value of a batch element of a result.
inline Matrix Expected(const CallAttributes& at,
                       const std::vector<RankCall>& calls,
                       int rank,
                       size_t result,
                       int64_t b) {
  const auto& in = calls[rank].operands;
  const size_t n = at.num_kernels;
  Matrix sum{calls[rank].results[result].rows, calls[rank].results[result].features};
  const auto scattered = [&](size_t operand) {
    for (const RankCall& call : calls) {
      Add(CopyRows(call.operands[operand], b, rank * sum.rows, sum.rows), sum);
    }
    return sum;
  };
  const auto kernel = [&](const Tensor& w) {
    return at.rhs_transposed ? Transposed(Copy(w)) : Copy(w);
  };
  const auto scale = [&] {
    for (float& value : sum.values) value *= at.scale;
  };
  switch (at.op) {
    case Op::kAllGatherMatmul:
      if (result == n) return Gathered(calls, 0, b);
      AddProduct(Gathered(calls, 0, b), kernel(in[1 + result]), sum);
      scale();
      if (at.has_bias) Add(Copy(in[1 + n + result]), sum);
      if (at.has_residual) Add(Copy(in[jax_ub::FirstResidual(at) + result], b), sum);
      return sum;
    case Op::kMatmulReduceScatter:
    case Op::kMatmulAllReduce:
    case Op::kMatmul: {
      const bool local = at.op == Op::kMatmul;
      const int64_t first = at.op == Op::kMatmulReduceScatter ? rank * sum.rows : 0;
      for (int r = local ? rank : 0; r < (local ? rank + 1 : at.num_ranks); ++r) {
        const auto& from = calls[r].operands;
        for (size_t i = 0; i < n; ++i) {
          AddProduct(CopyRows(from[i], b, first, sum.rows), kernel(from[n + i]), sum);
        }
      }
      scale();
      if (at.has_bias) Add(Copy(in[2 * n]), sum);
      if (at.has_residual) Add(Copy(in[2 * n + at.has_bias], b), sum);
      return sum;
    }
    case Op::kWgrad:
    case Op::kBulkReduceScatter: {
      if (result == n) return scattered(in.size() - 1);
      const size_t dy = 1 + result;
      const auto tokens = [&](size_t operand, Gather gather, int64_t batch) {
        const bool is_gathered = at.op == Op::kWgrad && at.gather == gather;
        return is_gathered ? Gathered(calls, operand, batch) : Copy(in[operand], batch);
      };
      for (int64_t batch = 0; batch < in[0].batch; ++batch) {
        AddProduct(Transposed(tokens(0, Gather::kX, batch)),
                   tokens(dy, Gather::kDy, batch), sum);
      }
      scale();
      if (at.accumulate) Add(Copy(in[dy + n]), sum);
      return sum;
    }
    case Op::kAllGather:
      return Gathered(calls, 0, b);
    case Op::kReduceScatter:
      return scattered(0);
    case Op::kAllReduce:
      for (const RankCall& call : calls) Add(Copy(call.operands[0], b), sum);
      if (at.has_bias) Add(Copy(in[1]), sum);
      if (at.has_residual) Add(Copy(in[1 + at.has_bias], b), sum);
      return sum;
    case Op::kBulkAllGather:
      if (result == 1) return Gathered(calls, 2 * n, b);
      for (size_t i = 0; i < n; ++i) {
        AddProduct(Copy(in[i], b), Transposed(Copy(in[n + i])), sum);
      }
      return sum;
  }
  return sum;
}

// Returns the number of elements of these ranks' results that differ from the expected
// value.
inline int64_t NumWrong(const CallAttributes& at,
                        const std::vector<RankCall>& calls,
                        const std::vector<int>& ranks) {
  int64_t num_wrong = 0;
  for (const int rank : ranks) {
    for (size_t i = 0; i < calls[rank].results.size(); ++i) {
      const Tensor& result = calls[rank].results[i];
      for (int64_t b = 0; b < result.batch; ++b) {
        const Matrix actual = Copy(result, b),
                     expected = Expected(at, calls, rank, i, b);
        for (size_t e = 0; e < actual.values.size(); ++e) {
          num_wrong += actual.values[e] != expected.values[e];
        }
      }
    }
  }
  return num_wrong;
}

// Returns the number of wrong elements in the results of all ranks.
inline int64_t NumWrong(const CallAttributes& at, const std::vector<RankCall>& calls) {
  std::vector<int> ranks(at.num_ranks);
  std::iota(ranks.begin(), ranks.end(), 0);
  return NumWrong(at, calls, ranks);
}

}  // namespace jax_ub_test
