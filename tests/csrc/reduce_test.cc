// Compares sums of chunks, bit by bit, with plain f32 additions in the same order.

#include "reduce/reduce.h"

#include "check.h"
#include "gemm/gemm.h"
#include "random_gemm.h"

namespace jax_ub {

struct Case {
  int64_t rows, columns;
  std::vector<ConstMatrix> chunks;
  Matrix out;
};

// Returns random chunks with at most `gap` elements between two rows.
Case MakeCase(Random& random, Buffers& buffers, int64_t gap = 3) {
  Case made = {Pick(random, 0, 5), Pick(random, 0, 150), {}, {}};
  auto buffer = [&](int64_t stride, DType dtype) {
    const int64_t elements =
        made.rows > 0 ? (made.rows - 1) * stride + made.columns : 0;
    std::byte* data = buffers.Add(elements * SizeOf(dtype));
    for (int64_t i = 0; i < elements; ++i) {
      Write(data + i * SizeOf(dtype), dtype, RandomValue(random, Values::kNormal));
    }
    return data;
  };
  for (int64_t i = Pick(random, 1, 9); i > 0; --i) {
    const DType dtype = static_cast<DType>(Pick(random, 0, 2));
    const int64_t stride = made.columns + Pick(random, 0, gap);
    made.chunks.push_back({buffer(stride, dtype), stride, dtype});
  }
  const DType dtype = static_cast<DType>(Pick(random, 0, 2));
  const int64_t stride = made.columns + Pick(random, 0, gap);
  made.out = {buffer(stride, dtype), stride, dtype};
  return made;
}

// Returns the expected element (r, c), added and rounded as described in reduce.h.
float Expected(const Case& made, int64_t r, int64_t c) {
  float sum = 0;
  for (size_t i = 0; i < made.chunks.size(); ++i) {
    const ConstMatrix& chunk = made.chunks[i];
    const int64_t at = (r * chunk.row_stride + c) * SizeOf(chunk.dtype);
    const float x = Read(chunk.data + at, chunk.dtype);
    sum = i == 0 ? x : sum + x;
  }
  std::byte rounded[4];
  Write(rounded, made.out.dtype, sum);
  return Read(rounded, made.out.dtype);
}

int64_t CountWrong(const Case& made) {
  std::vector<float> expected;
  for (int64_t i = 0; i < made.rows * made.columns; ++i) {
    expected.push_back(Expected(made, i / made.columns, i % made.columns));
  }
  SumChunks(made.chunks, made.rows, made.columns, made.out);
  int64_t num_wrong = 0;
  for (int64_t i = 0; i < made.rows * made.columns; ++i) {
    const int64_t at = i / made.columns * made.out.row_stride + i % made.columns;
    const float found =
        Read(made.out.data + at * SizeOf(made.out.dtype), made.out.dtype);
    num_wrong += found != expected[i];
  }
  return num_wrong;
}

TEST(sums_are_those_of_f32_additions_in_rank_order_rounded_once) {
  const std::string_view in_use = CurrentIsa();
  for (std::string_view isa : AvailableIsas()) {
    SetIsa(isa);
    for (uint64_t seed = 0; seed < 500; ++seed) {
      Random random(seed);
      Buffers buffers;
      const int64_t gap = seed % 4;  // 0: the rows of all follow each other
      const int64_t num_wrong = CountWrong(MakeCase(random, buffers, gap));
      if (num_wrong != 0) {
        check::Fail(__FILE__, __LINE__, isa, ", seed ", seed, ": ", num_wrong,
                    " wrong");
      }
    }
  }
  SetIsa(in_use);
}

TEST(a_sum_may_replace_its_first_chunk) {
  Random random(7);
  Buffers buffers;
  for (int i = 0; i < 100; ++i) {
    Case made = MakeCase(random, buffers);
    made.chunks[0] = {made.out.data, made.out.row_stride, made.out.dtype};
    CHECK_EQ(CountWrong(made), 0);
  }
}

TEST(rows_of_one_element_are_summed) {
  for (int64_t rows : {1, 7, 64, 1001}) {
    for (int64_t gap : {0, 1}) {
      std::vector<float> chunk(rows * (1 + gap), 0.5f), out(rows * (1 + gap), 3.0f);
      const auto* data = reinterpret_cast<const std::byte*>(chunk.data());
      const ConstMatrix in = {data, 1 + gap, DType::kF32};
      const ConstMatrix repeated = {data, 0, DType::kF32};
      SumChunks(std::vector{in, repeated, in}, rows, 1,
                {reinterpret_cast<std::byte*>(out.data()), 1 + gap, DType::kF32});
      for (int64_t i = 0; i < rows * (1 + gap); ++i) {
        CHECK_EQ(out[i], i % (1 + gap) == 0 ? 1.5f : 3.0f);
      }
    }
  }
}

// Every f16 and bf16 number is unchanged by a conversion to f32 and back, and
// conversions of buffers round to even.
TEST(conversions_keep_every_number) {
  const std::string_view in_use = CurrentIsa();
  for (std::string_view isa : AvailableIsas()) {
    SetIsa(isa);
    for (DType dtype : {DType::kBF16, DType::kF16}) {
      std::vector<uint16_t> buffers(65536), back(65536);
      for (int i = 0; i < 65536; ++i) buffers[i] = static_cast<uint16_t>(i);
      std::vector<float> wide(65536);
      const ConstMatrix in = {reinterpret_cast<std::byte*>(buffers.data()), 65536,
                              dtype};
      auto* middle = reinterpret_cast<std::byte*>(wide.data());
      SumChunks({&in, 1}, 1, 65536, {middle, 65536, DType::kF32});
      const ConstMatrix from = {middle, 65536, DType::kF32};
      auto* out = reinterpret_cast<std::byte*>(back.data());
      SumChunks({&from, 1}, 1, 65536, {out, 65536, dtype});
      int64_t num_wrong = 0;
      for (int i = 0; i < 65536; ++i) {
        const float expected = Read(in.data + 2 * i, dtype);
        const bool is_nan = std::isnan(expected);
        num_wrong += is_nan ? !std::isnan(wide[i]) : wide[i] != expected;
        num_wrong +=
            is_nan ? !std::isnan(Read(out + 2 * i, dtype)) : back[i] != buffers[i];
      }
      CHECK_EQ(num_wrong, 0);
    }
  }
  SetIsa(in_use);
}

TEST(rounding_to_half_types_is_to_nearest_even_at_every_scale) {
  const std::string_view in_use = CurrentIsa();
  for (std::string_view isa : AvailableIsas()) {
    SetIsa(isa);
    Random random(3);
    for (DType dtype : {DType::kBF16, DType::kF16}) {
      std::vector<float> wide(4096);
      for (float& x : wide) {
        // Numbers have any exponent, and fractions that are often ties.
        const uint32_t bits = static_cast<uint32_t>(random());
        x = std::bit_cast<float>(bits & (Pick(random, 0, 1) ? ~0u : 0xfffff000u));
      }
      std::vector<uint16_t> found(4096);
      const ConstMatrix in = {reinterpret_cast<std::byte*>(wide.data()), 4096,
                              DType::kF32};
      auto* out = reinterpret_cast<std::byte*>(found.data());
      SumChunks({&in, 1}, 1, 4096, {out, 4096, dtype});
      int64_t num_wrong = 0;
      for (int i = 0; i < 4096; ++i) {
        uint16_t expected[2];
        Write(reinterpret_cast<std::byte*>(expected), dtype, wide[i]);
        const bool is_nan = std::isnan(wide[i]);
        num_wrong +=
            is_nan ? !std::isnan(Read(out + 2 * i, dtype)) : found[i] != *expected;
      }
      CHECK_EQ(num_wrong, 0);
    }
  }
  SetIsa(in_use);
}

TEST(rows_are_copied_with_their_strides) {
  const std::vector<std::byte> source(35, std::byte{7});
  std::vector<std::byte> target(60, std::byte{1});
  CopyRows(source.data(), 7, target.data(), 12, 5, 6);
  for (int i = 0; i < 60; ++i) {
    CHECK(target[i] == (i % 12 < 6 ? std::byte{7} : std::byte{1}));
  }
}

TEST(a_sum_of_nothing_is_refused) {
  CHECK_THROWS(SumChunks({}, 1, 1, {}), "no chunks");
}

}  // namespace jax_ub

CHECK_MAIN()
