// Tests the source of the kernels that sum, copy and transpose on the host: sums have
// the CPU engine's bits.

#include <utility>
#include <vector>

#include "check.h"
#include "cuda/launched_kernels.h"
#include "random_gemm.h"
#include "reduce/cuda/sum_params.h"
#include "reduce/reduce.h"

namespace jax_ub {

// Matrices in memory that begins at a multiple of 16 bytes or, if shifted, one element
// after it.
class Matrices {
 public:
  std::byte* Add(int64_t elements, DType dtype, bool shifted, Random& random) {
    buffers_.emplace_back((elements + 1) * SizeOf(dtype) / 16 + 1);
    std::byte* data = reinterpret_cast<std::byte*>(buffers_.back().data());
    if (shifted) data += SizeOf(dtype);
    for (int64_t i = 0; i < elements; ++i) {
      Write(data + i * SizeOf(dtype), dtype, RandomValue(random, Values::kNormal));
    }
    return data;
  }

 private:
  struct alignas(16) Line {
    std::byte bytes[16];
  };
  std::vector<std::vector<Line>> buffers_;
};

struct SumCase {
  SumParams params = {};
  std::vector<ConstMatrix> chunks;
  Matrix out;
  int64_t num_out = 0;  // elements that its rows span
};

SumCase MakeSum(Random& random, Matrices& matrices) {
  SumCase made;
  SumParams& params = made.params;
  params.rows = Pick(random, 1, 5);
  params.columns = Pick(random, 1, 70);
  params.is_aligned = Pick(random, 0, 1);
  const auto matrix = [&](DType dtype, bool repeats) {
    int64_t stride = params.columns + Pick(random, 0, 3);
    if (params.is_aligned) stride = (stride + 7) / 8 * 8;
    const int64_t span = (params.rows - 1) * stride + params.columns;
    std::byte* data = matrices.Add(span, dtype, !params.is_aligned, random);
    return std::pair(data, repeats ? int64_t{0} : stride);
  };
  params.num_parts = static_cast<uint32_t>(Pick(random, 1, kMaxParts));
  for (uint32_t i = 0; i < params.num_parts; ++i) {
    const DType dtype = static_cast<DType>(Pick(random, 0, 2));
    const auto [data, stride] = matrix(dtype, Pick(random, 0, 4) == 0);
    params.parts[i] = {AddressOf(data), stride, dtype};
    made.chunks.push_back({data, stride, dtype});
  }
  const DType dtype = static_cast<DType>(Pick(random, 0, 2));
  const auto [data, stride] = matrix(dtype, false);
  params.out = {AddressOf(data), stride, dtype};
  made.out = {data, stride, dtype};
  made.num_out = (params.rows - 1) * stride + params.columns;
  return made;
}

TEST(sums_are_the_cpu_s_bit_by_bit_and_touch_nothing_else) {
  for (uint64_t seed = 0; seed < 400; ++seed) {
    Random random(seed);
    Matrices matrices;
    const SumCase made = MakeSum(random, matrices);
    const int64_t bytes = made.num_out * SizeOf(made.out.dtype);
    const std::vector<std::byte> before(made.out.data, made.out.data + bytes);
    SumChunks(made.chunks, made.params.rows, made.params.columns, made.out);
    const std::vector<std::byte> expected(made.out.data, made.out.data + bytes);
    std::copy(before.begin(), before.end(), made.out.data);
    // The launch may have fewer threads than there are vectors, or more than a row has.
    Launch(kSumKernel, made.params, static_cast<unsigned>(Pick(random, 1, 3)),
           static_cast<unsigned>(Pick(random, 1, 20)));
    const std::vector<std::byte> found(made.out.data, made.out.data + bytes);
    if (found != expected) check::Fail(__FILE__, __LINE__, "seed ", seed, " differs");
  }
}

TEST(a_sum_may_be_stored_over_one_of_its_parts) {
  Random random(1);
  Matrices matrices;
  for (DType dtype : {DType::kF32, DType::kBF16}) {
    std::byte* own = matrices.Add(64, dtype, false, random);
    std::byte* other = matrices.Add(64, dtype, false, random);
    SumParams params = {};
    params.num_parts = 2;
    params.is_aligned = true;
    params.rows = 2;
    params.columns = 32;
    params.out = params.parts[0] = {AddressOf(own), 32, dtype};
    params.parts[1] = {AddressOf(other), 32, dtype};
    std::vector<float> expected;
    for (int64_t i = 0; i < 64; ++i) {
      const int64_t at = i * SizeOf(dtype);
      std::byte rounded[4];
      Write(rounded, dtype, Read(own + at, dtype) + Read(other + at, dtype));
      expected.push_back(Read(rounded, dtype));
    }
    Launch(kSumKernel, params, 2, 3);
    for (int64_t i = 0; i < 64; ++i) {
      CHECK_EQ(Read(own + i * SizeOf(dtype), dtype), expected[i]);
    }
  }
}

TEST(a_sum_rejects_a_smaller_alignment_than_declared) {
  alignas(16) float numbers[16] = {};
  SumParams params = {};
  params.num_parts = 1;
  params.is_aligned = true;
  params.rows = 1;
  params.columns = 8;
  params.out = {AddressOf(numbers), 8, DType::kF32};
  params.parts[0] = {AddressOf(numbers + 1), 8, DType::kF32};
  CHECK_THROWS(Launch(kSumKernel, params, 1, 1), "misaligned part of a sum");
}

TEST(copies_move_rows_and_nothing_between_them) {
  for (uint64_t seed = 0; seed < 300; ++seed) {
    Random random(seed);
    const int64_t unit = int64_t{1} << Pick(random, 0, 4);
    const int64_t rows = Pick(random, 1, 5);
    const int64_t row_bytes = unit * Pick(random, 1, 40);
    const int64_t from_stride = row_bytes + unit * Pick(random, 0, 3);
    const int64_t to_stride = row_bytes + unit * Pick(random, 0, 3);
    Matrices matrices;
    const auto bytes = [&](int64_t stride) {
      return matrices.Add(rows * stride / 2 + 1, DType::kBF16, false, random);
    };
    const std::byte* from = bytes(from_stride);
    std::byte* to = bytes(to_stride);
    std::vector<std::byte> expected(to, to + rows * to_stride);
    CopyRows(from, from_stride, expected.data(), to_stride, rows, row_bytes);
    const CopyParams params = {.from = AddressOf(from),
                               .to = AddressOf(to),
                               .num_rows = rows,
                               .row_bytes = row_bytes,
                               .from_stride = from_stride,
                               .to_stride = to_stride,
                               .unit_bytes = static_cast<uint32_t>(unit)};
    Launch(kCopyKernel, params, static_cast<unsigned>(Pick(random, 1, 3)),
           static_cast<unsigned>(Pick(random, 1, 20)));
    const std::vector<std::byte> found(to, to + rows * to_stride);
    if (found != expected) check::Fail(__FILE__, __LINE__, "seed ", seed, " differs");
  }
}

TEST(transpositions_move_every_byte_and_nothing_between_rows) {
  for (uint64_t seed = 0; seed < 100; ++seed) {
    Random random(seed);
    const int64_t rows = 16 * Pick(random, 1, 9);
    const int64_t columns = 16 * Pick(random, 1, 19);
    const int64_t from_stride = columns + 16 * Pick(random, 0, 2);
    const int64_t to_stride = rows + 16 * Pick(random, 0, 2);
    Matrices matrices;
    const auto bytes = [&](int64_t size) {
      std::byte* data = matrices.Add(size / 2, DType::kBF16, false, random);
      for (int64_t i = 0; i < size; ++i) data[i] = std::byte(Pick(random, 0, 255));
      return data;
    };
    const std::byte* from = bytes(rows * from_stride);
    std::byte* to = bytes(columns * to_stride);
    std::vector<std::byte> expected(to, to + columns * to_stride);
    for (int64_t r = 0; r < rows; ++r) {
      for (int64_t c = 0; c < columns; ++c) {
        expected[c * to_stride + r] = from[r * from_stride + c];
      }
    }
    const TransposeParams params = {.from = AddressOf(from),
                                    .to = AddressOf(to),
                                    .rows = rows,
                                    .columns = columns,
                                    .from_stride = from_stride,
                                    .to_stride = to_stride};
    Launch(kTransposeKernel, params, static_cast<unsigned>(Pick(random, 1, 3)),
           kTransposeThreads);
    const std::vector<std::byte> found(to, to + columns * to_stride);
    if (found != expected) check::Fail(__FILE__, __LINE__, "seed ", seed, " differs");
  }
}

}  // namespace jax_ub

CHECK_MAIN()
