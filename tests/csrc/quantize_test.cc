// Amaxes and casts to FP8, on every instruction set that this machine has, compared with
// a search for the nearest FP8 number.

#include "quantize/cpu/quantize.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <limits>
#include <numeric>
#include <vector>

#include "each_isa.h"
#include "fp8_codes.h"
#include "random_gemm.h"

namespace jax_ub {

constexpr float kInf = std::numeric_limits<float>::infinity();
constexpr float kNan = std::numeric_limits<float>::quiet_NaN();

// Runs the units of a pass in a random order.
template <typename Pass>
void RunInAnyOrder(const Pass& pass, Random& random) {
  const QuantizeUnits units(pass.layout);
  std::vector<int64_t> order(units.count());
  std::iota(order.begin(), order.end(), 0);
  std::shuffle(order.begin(), order.end(), random);
  for (int64_t unit : order) pass.RunUnit(units, unit);
}

// Returns the index of the scale of element `i`.
int64_t ScaleOf(const ScaleLayout& layout, int64_t i) {
  const int64_t group = i / (layout.rows * layout.columns);
  return layout.per_column ? group * layout.columns + i % layout.columns : group;
}

// An array of numbers with very different exponents, as f32 and in its dtype.
struct Source {
  DType dtype;
  std::vector<float> numbers;
  std::vector<std::byte> data;
};

Source MakeSource(Random& random, int64_t size, DType dtype, bool has_specials) {
  Source x = {dtype, {}, std::vector<std::byte>(size * SizeOf(dtype))};
  for (int64_t i = 0; i < size; ++i) {
    const int exponent = static_cast<int>(Pick(random, -12, 12));
    float number = std::ldexp(RandomValue(random, Values::kNormal), exponent);
    if (has_specials && Pick(random, 0, 40) == 0) {
      const float specials[] = {kNan, -kNan, kInf, -kInf, 0.0f, -0.0f};
      number = specials[Pick(random, 0, 5)];
    }
    std::byte* const at = &x.data[i * SizeOf(dtype)];
    Write(at, dtype, number);
    x.numbers.push_back(Read(at, dtype));
  }
  return x;
}

// Returns the code of the FP8 number nearest to x. Of two, the one with an even code.
int NearestCode(float x, DType fp8) {
  // An infinity becomes the largest FP8 number, like any number above it.
  const double magnitude = std::min(std::abs(x), 1e6f);
  int nearest = 0;
  double least = kInf;
  for (int code = 0; code < 128; ++code) {
    const auto byte = static_cast<std::byte>(code);
    const double number = Read(&byte, fp8);
    if (!std::isfinite(number)) continue;
    const double distance = std::abs(number - magnitude);
    if (distance < least || (distance == least && code % 2 == 0)) {
      nearest = code;
      least = distance;
    }
  }
  return nearest | (std::signbit(x) ? 0x80 : 0);
}

ScaleLayout RandomLayout(Random& random) {
  const bool per_column = Pick(random, 0, 1) == 1;
  return {Pick(random, 1, 6), per_column ? Pick(random, 1, 40) : 1,
          Pick(random, 1, 200), per_column};
}

void CompareAmaxes(const ScaleLayout& layout, DType dtype, uint64_t seed) {
  Random random(seed);
  const Source x = MakeSource(random, layout.num_elements(), dtype, seed % 2 == 0);
  for (bool keeps_nan : {false, true}) {
    std::vector<float> expected(layout.num_scales(), 0.0f);
    std::vector<int32_t> found(layout.num_scales());
    for (size_t i = 0; i < x.numbers.size(); ++i) {
      float& largest = expected[ScaleOf(layout, static_cast<int64_t>(i))];
      const float number = x.numbers[i];
      if (std::isnan(number)) {
        largest = keeps_nan ? kNan : kInf;
      } else if (!std::isnan(largest)) {
        largest = std::max(largest, std::abs(number));
      }
    }
    const AmaxPass pass{layout, dtype, x.data.data(), keeps_nan, found.data()};
    pass.Begin();
    RunInAnyOrder(pass, random);
    CHECK(std::equal(
        found.begin(), found.end(), expected.begin(),
        [](int32_t bits, float x) { return AreSame(std::bit_cast<float>(bits), x); }));
  }
}

void CompareCasts(const ScaleLayout& layout, DType dtype, DType fp8, uint64_t seed) {
  Random random(seed);
  const Source x = MakeSource(random, layout.num_elements(), dtype, seed % 2 == 0);
  const DType scale_dtype = seed % 3 == 0 ? DType::kE8M0 : DType::kF32;
  std::vector<std::byte> scales(layout.num_scales() * SizeOf(scale_dtype));
  std::vector<float> inverse;
  for (int64_t i = 0; i < layout.num_scales(); ++i) {
    const float scale = std::exp(RandomValue(random, Values::kNormal));
    const auto exponent = static_cast<int>(Pick(random, -12, 12));
    if (scale_dtype == DType::kF32) {
      Write(&scales[i * 4], DType::kF32, scale);
    } else {
      scales[i] = static_cast<std::byte>(127 + exponent);
    }
    inverse.push_back(scale_dtype == DType::kF32 ? 1.0f / scale
                                                 : std::ldexp(1.0f, -exponent));
  }
  std::vector<std::byte> found(layout.num_elements());
  RunInAnyOrder(CastPass{layout, dtype, x.data.data(), scale_dtype, scales.data(), fp8,
                         found.data()},
                random);
  int64_t num_wrong = 0;
  for (int64_t i = 0; i < layout.num_elements(); ++i) {
    const float quotient = x.numbers[i] * inverse[ScaleOf(layout, i)];
    num_wrong += std::isnan(quotient)
                     ? !std::isnan(Read(&found[i], fp8))
                     : static_cast<int>(found[i]) != NearestCode(quotient, fp8);
  }
  CHECK_EQ(num_wrong, 0);
}

TEST(amaxes_of_any_layout) {
  ForEachIsa([](const Isa&) {
    for (uint64_t seed = 1; seed <= 60; seed += kCaseStep) {
      Random random(seed);
      CompareAmaxes(RandomLayout(random), static_cast<DType>(seed % 3), seed);
    }
  });
}

TEST(casts_of_any_layout_round_to_the_nearest_number) {
  ForEachIsa([](const Isa&) {
    for (uint64_t seed = 1; seed <= 60; seed += kCaseStep) {
      Random random(seed);
      const DType fp8 = Pick(random, 0, 1) ? DType::kE4M3 : DType::kE5M2;
      CompareCasts(RandomLayout(random), static_cast<DType>(seed % 3), fp8, seed);
    }
  });
}

// Arrays of several units: one group, many groups, and groups with columns.
TEST(large_arrays) {
  const ScaleLayout layouts[] = {{1, 1, 200001, false},
                                 {700, 1, 299, false},
                                 {2, 300, 500, true},
                                 {3, 1, 100003, false},
                                 {70, 32, 67, true}};
  uint64_t seed = 100;
  for (const ScaleLayout& layout : layouts) {
    CHECK(QuantizeUnits(layout).count() > 1);
    CompareAmaxes(layout, DType::kBF16, ++seed);
    CompareCasts(layout, DType::kBF16, DType::kE4M3, seed);
  }
}

// The quotients are all FP8 numbers, the middles of their neighbors, and the f32 numbers
// next to the middles.
TEST(ties_round_to_even) {
  ForEachIsa([](const Isa&) {
    for (DType fp8 : {DType::kE4M3, DType::kE5M2}) {
      std::vector<float> numbers;
      for (int code = 0; code < 127; ++code) {
        const std::byte bytes[] = {static_cast<std::byte>(code),
                                   static_cast<std::byte>(code + 1)};
        const float low = Read(&bytes[0], fp8), high = Read(&bytes[1], fp8);
        if (!std::isfinite(high) || !std::isfinite(low)) continue;
        const float middle = (low + high) / 2;
        for (float sign : {1.0f, -1.0f}) {
          for (float x : {low, high, middle, std::nextafter(middle, 0.0f),
                          std::nextafter(middle, kInf)}) {
            numbers.push_back(sign * x);
          }
        }
      }
      const auto size = static_cast<int64_t>(numbers.size());
      const float scale = 1;
      std::vector<std::byte> found(size);
      Random random(1);
      RunInAnyOrder(CastPass{{1, 1, size, false},
                             DType::kF32,
                             numbers.data(),
                             DType::kF32,
                             &scale,
                             fp8,
                             found.data()},
                    random);
      int64_t num_wrong = 0;
      for (int64_t i = 0; i < size; ++i) {
        num_wrong += static_cast<int>(found[i]) != NearestCode(numbers[i], fp8);
      }
      CHECK_EQ(num_wrong, 0);
    }
  });
}

}  // namespace jax_ub

CHECK_MAIN()
