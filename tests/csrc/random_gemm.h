// Random GEMM problems over random segmentations, layouts and dtypes, with a reference.
#pragma once

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <memory>
#include <optional>
#include <random>
#include <vector>

#include "gemm/gemm.h"

namespace jax_ub {

using Random = std::mt19937_64;

inline int64_t Pick(Random& random, int64_t low, int64_t high) {
  return std::uniform_int_distribution<int64_t>(low, high)(random);
}

// Simple conversions, which serve as references for those of the kernels.
inline float F16ToF32(uint16_t h) {
  const int exponent = h >> 10 & 31;
  const int fraction = h & 1023;
  float magnitude = std::ldexp(static_cast<float>(fraction | 1024), exponent - 25);
  if (exponent == 0) magnitude = std::ldexp(static_cast<float>(fraction), -24);
  if (exponent == 31) magnitude = fraction ? NAN : INFINITY;
  return h & 0x8000 ? -magnitude : magnitude;
}

inline uint16_t F32ToF16(float x) {
  const uint16_t sign = std::signbit(x) ? 0x8000 : 0;
  const double magnitude = std::abs(static_cast<double>(x));
  if (std::isnan(x)) return sign | 0x7e00;
  if (magnitude >= 65520) return sign | 0x7c00;
  const int exponent = magnitude < std::ldexp(1.0, -14) ? -14 : std::ilogb(magnitude);
  // The magnitude in units of the last place of this exponent, rounded to nearest even.
  const double units = std::nearbyint(std::ldexp(magnitude, 10 - exponent));
  return sign | static_cast<uint16_t>(units + (exponent + 14) * 1024.0);
}

// The number of an FP8 code, by the definition of the format.
inline float Fp8ToF32(uint8_t code, DType dtype) {
  const bool is_e4m3 = dtype == DType::kE4M3;
  const int fraction_bits = is_e4m3 ? 3 : 2;
  const int bias = is_e4m3 ? 7 : 15;
  const int magnitude = code & 0x7f;
  const int exponent = magnitude >> fraction_bits;
  const int fraction = magnitude & ((1 << fraction_bits) - 1);
  float x = std::ldexp(
      static_cast<float>(fraction + (exponent == 0 ? 0 : 1 << fraction_bits)),
      std::max(exponent, 1) - bias - fraction_bits);
  if (is_e4m3 && magnitude == 0x7f) x = NAN;
  if (!is_e4m3 && exponent == 31) x = fraction != 0 ? NAN : INFINITY;
  return code & 0x80 ? -x : x;
}

// The numbers of all codes. They are not local to a function, where each use would check
// whether they are initialized, which takes ThreadSanitizer longer than the use.
using Fp8NumberTable = std::array<float, 256>;
inline Fp8NumberTable MakeFp8Numbers(DType dtype) {
  Fp8NumberTable all;
  for (int code = 0; code < 256; ++code) all[code] = Fp8ToF32(code, dtype);
  return all;
}
inline const Fp8NumberTable e4m3_numbers = MakeFp8Numbers(DType::kE4M3);
inline const Fp8NumberTable e5m2_numbers = MakeFp8Numbers(DType::kE5M2);

inline const Fp8NumberTable& Fp8Numbers(DType dtype) {
  return dtype == DType::kE4M3 ? e4m3_numbers : e5m2_numbers;
}

// Rounds to the nearest finite code, to the even one of two.
inline uint8_t F32ToFp8(float x, DType dtype) {
  const Fp8NumberTable& numbers = Fp8Numbers(dtype);  // ascending up to `last`
  const auto last = numbers.begin() + (dtype == DType::kE4M3 ? 0x7e : 0x7b);
  const float magnitude = std::abs(x);
  const auto above = std::lower_bound(numbers.begin(), last, magnitude);
  auto code = static_cast<uint8_t>(above - numbers.begin());
  if (code > 0) {
    const float to_above = *above - magnitude, to_below = magnitude - above[-1];
    if (to_below < to_above || (to_below == to_above && code % 2 == 1)) --code;
  }
  return std::signbit(x) ? code | 0x80 : code;
}

inline float Read(const std::byte* p, DType dtype) {
  if (IsFp8(dtype)) return Fp8Numbers(dtype)[static_cast<uint8_t>(*p)];
  if (dtype == DType::kE8M0) {
    const auto exponent = static_cast<uint8_t>(*p);
    return exponent == 255 ? std::nanf("") : std::ldexp(1.0f, exponent - 127);
  }
  if (dtype == DType::kF32) {
    float x;
    std::memcpy(&x, p, 4);
    return x;
  }
  uint16_t h;
  std::memcpy(&h, p, 2);
  return dtype == DType::kF16 ? F16ToF32(h) : std::bit_cast<float>(uint32_t{h} << 16);
}

inline void Write(std::byte* p, DType dtype, float x) {
  if (IsFp8(dtype)) {
    *p = static_cast<std::byte>(F32ToFp8(x, dtype));
    return;
  }
  if (dtype == DType::kE8M0) {  // a power of two
    *p = static_cast<std::byte>(127 + std::ilogb(x));
    return;
  }
  if (dtype == DType::kF32) {
    std::memcpy(p, &x, 4);
    return;
  }
  uint16_t h = 0;
  if (dtype == DType::kF16) {
    h = F32ToF16(x);
  } else {
    const uint32_t u = std::bit_cast<uint32_t>(x);
    h = std::isnan(x) ? (u >> 16 | 0x40) : (u + 0x7fff + (u >> 16 & 1)) >> 16;
  }
  std::memcpy(p, &h, 2);
}

// Allocates buffers of exactly the bytes that a segment spans, so that AddressSanitizer
// detects an access past either end.
class Buffers {
 public:
  std::byte* Add(int64_t size_bytes) {
    all_.push_back({std::make_unique<std::byte[]>(size_bytes), size_bytes});
    return all_.back().data.get();
  }

  struct Buffer {
    std::unique_ptr<std::byte[]> data;
    int64_t size_bytes = 0;
  };
  const std::vector<Buffer>& all() const { return all_; }

 private:
  std::vector<Buffer> all_;
};

inline std::vector<int64_t> RandomBounds(Random& random,
                                         int64_t size,
                                         int64_t max_parts) {
  std::vector<int64_t> bounds = {0, size};
  for (int64_t i = Pick(random, 1, max_parts); i > 1; --i) {
    bounds.push_back(Pick(random, 0, size));
  }
  std::sort(bounds.begin(), bounds.end());
  return bounds;
}

enum class Values { kIntegers, kNormal };

inline float RandomValue(Random& random, Values values) {
  if (values == Values::kIntegers) return static_cast<float>(Pick(random, -2, 2));
  return std::normal_distribution<float>()(random);
}

// A matrix as dense f32, and as segments that contain the same (rounded) values.
struct RandomOperand {
  OperandView view;
  std::vector<float> dense;  // [outer][inner]
};

inline RandomOperand MakeOperand(Random& random,
                                 Buffers& buffers,
                                 int64_t outer,
                                 int64_t inner,
                                 DType dtype,
                                 Values values,
                                 int64_t max_parts) {
  RandomOperand operand;
  OperandView& view = operand.view;
  view.dtype = dtype;
  view.outer_bounds = RandomBounds(random, outer, max_parts);
  view.inner_bounds = RandomBounds(random, inner, max_parts);
  operand.dense.resize(outer * inner);
  const int64_t layout = Pick(random, 0, 4);  // 4: each segment its own
  for (size_t i = 0; i + 1 < view.outer_bounds.size(); ++i) {
    for (size_t j = 0; j + 1 < view.inner_bounds.size(); ++j) {
      const int64_t o0 = view.outer_bounds[i], o1 = view.outer_bounds[i + 1];
      const int64_t k0 = view.inner_bounds[j], k1 = view.inner_bounds[j + 1];
      const bool k_contiguous = layout == 4 ? Pick(random, 0, 1) : layout % 2;
      const int64_t line = k_contiguous ? k1 - k0 : o1 - o0;
      const int64_t lines = k_contiguous ? o1 - o0 : k1 - k0;
      const int64_t stride = line + (Pick(random, 0, 1) ? Pick(random, 0, 9) : 0);
      const int64_t size = lines > 0 ? (lines - 1) * stride + line : 0;
      std::byte* data = buffers.Add(size * SizeOf(dtype));
      const int64_t outer_stride = k_contiguous ? stride : 1;
      const int64_t inner_stride = k_contiguous ? 1 : stride;
      view.segments.push_back({data, outer_stride, inner_stride});
      for (int64_t o = o0; o < o1; ++o) {
        for (int64_t k = k0; k < k1; ++k) {
          std::byte* p = data + ((o - o0) * outer_stride + (k - k0) * inner_stride) *
                                    SizeOf(dtype);
          Write(p, dtype, RandomValue(random, values));
          operand.dense[o * inner + k] = Read(p, dtype);
        }
      }
    }
  }
  return operand;
}

// Gives each segment of an FP8 operand scales: random powers of two, for blocks of
// random sizes, or one for each element along a dimension.
inline void AddScales(Random& random, Buffers& buffers, RandomOperand& operand) {
  OperandView& view = operand.view;
  const int64_t inner = view.inner_bounds.back();
  view.scale_dtype = Pick(random, 0, 1) ? DType::kF32 : DType::kE8M0;
  const auto block = [&] {
    return std::vector<int64_t>{1, 2, 7, 32}[Pick(random, 0, 3)];
  };
  for (size_t i = 0; i + 1 < view.outer_bounds.size(); ++i) {
    for (size_t j = 0; j + 1 < view.inner_bounds.size(); ++j) {
      const int64_t o0 = view.outer_bounds[i], o1 = view.outer_bounds[i + 1];
      const int64_t k0 = view.inner_bounds[j], k1 = view.inner_bounds[j + 1];
      ScaleSegment scales = {nullptr, block(), 1, block(), 1};
      const int64_t num_outer = (o1 - o0 + scales.outer_block - 1) / scales.outer_block;
      const int64_t num_inner = (k1 - k0 + scales.inner_block - 1) / scales.inner_block;
      (Pick(random, 0, 1) ? scales.outer_stride = num_inner
                          : scales.inner_stride = num_outer);
      const int64_t bytes = SizeOf(view.scale_dtype);
      std::byte* data = buffers.Add(num_outer * num_inner * bytes);
      std::vector<float> numbers(num_outer * num_inner);
      for (size_t s = 0; s < numbers.size(); ++s) {
        const int exponent = static_cast<int>(Pick(random, -2, 2));
        numbers[s] = std::ldexp(1.0f, exponent);
        if (view.scale_dtype == DType::kF32) {
          Write(data + s * bytes, DType::kF32, numbers[s]);
        } else {
          data[s] = static_cast<std::byte>(127 + exponent);
        }
      }
      scales.data = data;
      view.scales.push_back(scales);
      for (int64_t o = o0; o < o1; ++o) {
        for (int64_t k = k0; k < k1; ++k) {
          operand.dense[o * inner + k] *=
              numbers[(o - o0) / scales.outer_block * scales.outer_stride +
                      (k - k0) / scales.inner_block * scales.inner_stride];
        }
      }
    }
  }
}

// A GEMM problem, the memory of its result, and the expected result before rounding.
struct RandomGemm {
  Buffers buffers;
  GemmProblem problem;
  std::vector<std::vector<double>> expected;   // [replica][m * N + n]
  std::vector<std::vector<double>> magnitude;  // sum of absolute values, for tolerances

  std::byte* At(int replica, int64_t m, int64_t n) const {
    const ResultView& c = problem.c;
    const auto i = std::upper_bound(c.row_bounds.begin(), c.row_bounds.end(), m) - 1;
    const auto j =
        std::upper_bound(c.column_bounds.begin(), c.column_bounds.end(), n) - 1;
    const int64_t num_columns = c.column_bounds.size() - 1;
    const int64_t per_replica = (c.row_bounds.size() - 1) * num_columns;
    const Segment& segment =
        c.segments[replica * per_replica + (i - c.row_bounds.begin()) * num_columns +
                   (j - c.column_bounds.begin())];
    return segment.data + ((m - *i) * segment.row_stride + (n - *j)) * SizeOf(c.dtype);
  }
};

struct GemmSizes {
  int64_t m, n, k;
  int64_t max_parts;
};

inline void AddResult(Random& random,
                      RandomGemm& gemm,
                      const GemmSizes& sizes,
                      DType dtype) {
  ResultView& c = gemm.problem.c;
  c.dtype = dtype;
  c.num_replicas = static_cast<int>(Pick(random, 0, 3) == 0 ? 3 : 1);
  c.row_bounds = RandomBounds(random, sizes.m, sizes.max_parts);
  c.column_bounds = RandomBounds(random, sizes.n, sizes.max_parts);
  for (int replica = 0; replica < c.num_replicas; ++replica) {
    for (size_t i = 0; i + 1 < c.row_bounds.size(); ++i) {
      for (size_t j = 0; j + 1 < c.column_bounds.size(); ++j) {
        const int64_t rows = c.row_bounds[i + 1] - c.row_bounds[i];
        const int64_t columns = c.column_bounds[j + 1] - c.column_bounds[j];
        const int64_t stride = columns + Pick(random, 0, 3);
        const int64_t size = rows > 0 ? (rows - 1) * stride + columns : 0;
        c.segments.push_back({gemm.buffers.Add(size * SizeOf(dtype)), stride});
      }
    }
  }
}

// Adds an addend to the problem: a bias (row stride 0), a residual, or the result
// itself.
inline void AddAddend(Random& random, RandomGemm& gemm, Values values) {
  const ResultView& c = gemm.problem.c;
  const int64_t kind = Pick(random, 0, 2);
  AddendView addend;
  addend.dtype = kind == 2 ? c.dtype : static_cast<DType>(Pick(random, 0, 2));
  size_t index = 0;
  for (int replica = 0; replica < c.num_replicas; ++replica) {
    for (size_t i = 0; i + 1 < c.row_bounds.size(); ++i) {
      for (size_t j = 0; j + 1 < c.column_bounds.size(); ++j, ++index) {
        const int64_t rows = c.row_bounds[i + 1] - c.row_bounds[i];
        const int64_t columns = c.column_bounds[j + 1] - c.column_bounds[j];
        const int64_t bytes = SizeOf(addend.dtype);
        const int64_t stride = kind == 0 ? 0 : c.segments[index].row_stride;
        const int64_t lines = kind == 0 ? std::min<int64_t>(rows, 1) : rows;
        std::byte* data = c.segments[index].data;
        if (kind != 2) {
          data = gemm.buffers.Add((lines > 0 ? (lines - 1) * stride + columns : 0) *
                                  bytes);
        }
        addend.segments.push_back({data, stride});
        for (int64_t r = 0; r < lines; ++r) {
          for (int64_t col = 0; col < columns; ++col) {
            Write(data + (r * stride + col) * bytes, addend.dtype,
                  RandomValue(random, values));
          }
        }
        for (int64_t r = 0; r < rows; ++r) {
          for (int64_t col = 0; col < columns; ++col) {
            const int64_t at =
                (c.row_bounds[i] + r) * gemm.problem.n + c.column_bounds[j] + col;
            const float x = Read(data + (r * stride + col) * bytes, addend.dtype);
            gemm.expected[replica][at] += x;
            gemm.magnitude[replica][at] += std::abs(x);
          }
        }
      }
    }
  }
  gemm.problem.addends.push_back(std::move(addend));
}

// Multiplies the sums of the problem by random powers of two: one factor for each
// segment, or one for each of its rows or columns. `products` has the product of all
// factors, [segment along K][m * N + n].
inline void AddFactor(Random& random,
                      RandomGemm& gemm,
                      std::vector<std::vector<double>>& products) {
  const ResultView& c = gemm.problem.c;
  const int64_t kind = Pick(random, 0, 2);
  FactorView factor;
  for (std::vector<double>& product : products) {
    for (size_t i = 0; i + 1 < c.row_bounds.size(); ++i) {
      for (size_t j = 0; j + 1 < c.column_bounds.size(); ++j) {
        const int64_t rows = c.row_bounds[i + 1] - c.row_bounds[i];
        const int64_t columns = c.column_bounds[j + 1] - c.column_bounds[j];
        const int64_t size = kind == 0 ? 1 : kind == 1 ? rows : columns;
        auto* const data = reinterpret_cast<float*>(gemm.buffers.Add(4 * size));
        for (int64_t k = 0; k < size; ++k) {
          data[k] = std::ldexp(1.0f, static_cast<int>(Pick(random, -3, 3)));
        }
        const FactorSegment segment = {data, kind == 1, kind == 2};
        factor.segments.push_back(segment);
        for (int64_t r = 0; r < rows; ++r) {
          for (int64_t col = 0; col < columns; ++col) {
            product[(c.row_bounds[i] + r) * gemm.problem.n + c.column_bounds[j] +
                    col] *= data[r * segment.row_stride + col * segment.column_stride];
          }
        }
      }
    }
  }
  gemm.problem.factors.push_back(std::move(factor));
}

struct OperandDTypes {
  OperandDTypes(DType both) : a(both), b(both) {}  // NOLINT: implicit
  OperandDTypes(DType of_a, DType of_b) : a(of_a), b(of_b) {}

  DType a;
  DType b;
};

// The pairs of FP8 dtypes that a product may have.
inline const OperandDTypes kFp8Pairs[] = {{DType::kE4M3, DType::kE4M3},
                                          {DType::kE4M3, DType::kE5M2},
                                          {DType::kE5M2, DType::kE4M3}};

// How the operands and sums of a random GEMM are scaled.
struct Scaling {
  bool has_factors = false;
  bool has_factors_by_k = false;
  bool has_scales = false;  // of FP8 operands
};

inline std::unique_ptr<RandomGemm> MakeGemm(uint64_t seed,
                                            const GemmSizes& sizes,
                                            Values values,
                                            std::optional<OperandDTypes> operands = {},
                                            const Scaling& scaling = {}) {
  Random random(seed);
  auto gemm = std::make_unique<RandomGemm>();
  GemmProblem& problem = gemm->problem;
  problem.m = sizes.m;
  problem.n = sizes.n;
  problem.k = sizes.k;
  auto dtype = [&] { return static_cast<DType>(Pick(random, 0, 2)); };
  const DType a_dtype = operands ? operands->a : dtype();
  const DType b_dtype = operands ? operands->b : Pick(random, 0, 3) ? a_dtype : dtype();
  RandomOperand a = MakeOperand(random, gemm->buffers, sizes.m, sizes.k, a_dtype,
                                values, sizes.max_parts);
  RandomOperand b = MakeOperand(random, gemm->buffers, sizes.n, sizes.k, b_dtype,
                                values, sizes.max_parts);
  if (scaling.has_scales) {
    for (RandomOperand* operand : {&a, &b}) {
      if (IsFp8(operand->view.dtype)) AddScales(random, gemm->buffers, *operand);
    }
  }
  problem.a = a.view;
  problem.b = b.view;
  problem.has_factors_by_k = scaling.has_factors_by_k;
  AddResult(random, *gemm, sizes, dtype());
  const auto& parts = problem.a.inner_bounds;
  std::vector<std::vector<double>> factors(
      scaling.has_factors_by_k ? parts.size() - 1 : 1,
      std::vector<double>(sizes.m * sizes.n, 1.0));
  for (int64_t i = scaling.has_factors ? Pick(random, 0, 2) : 0; i > 0; --i) {
    AddFactor(random, *gemm, factors);
  }
  std::vector<double> product(sizes.m * sizes.n), magnitude(sizes.m * sizes.n);
  for (int64_t m = 0; m < sizes.m; ++m) {
    for (int64_t n = 0; n < sizes.n; ++n) {
      for (int64_t k = 0; k < sizes.k; ++k) {
        const size_t part =
            scaling.has_factors_by_k
                ? std::upper_bound(parts.begin(), parts.end(), k) - parts.begin() - 1
                : 0;
        const double x = double{a.dense[m * sizes.k + k]} * b.dense[n * sizes.k + k] *
                         factors[part][m * sizes.n + n];
        product[m * sizes.n + n] += x;
        magnitude[m * sizes.n + n] += std::abs(x);
      }
    }
  }
  problem.scale = Pick(random, 0, 2) == 0 ? 0.5f : 1.0f;
  for (double& sum : product) sum *= problem.scale;
  gemm->expected.assign(problem.c.num_replicas, product);
  gemm->magnitude.assign(problem.c.num_replicas, magnitude);
  bool has_own = false;
  for (int64_t i = Pick(random, 0, 3); i > 0; --i) {
    // The result itself can be an addend only once, since the first addition overwrites
    // it.
    if (has_own) break;
    AddAddend(random, *gemm, values);
    has_own = problem.addends.back().segments.data()->data ==
              reinterpret_cast<std::byte*>(problem.c.segments.data()->data);
  }
  return gemm;
}

}  // namespace jax_ub
