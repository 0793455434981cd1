// Random calls of the kernels that sum, copy and transpose, and their expected results.
#pragma once

#include <cstdint>
#include <functional>
#include <utility>
#include <vector>

#include "random_gemm.h"
#include "reduce/cuda/sum_params.h"
#include "reduce/reduce.h"

namespace jax_ub {

// Allocates memory of the host, aligned to 16 bytes.
class HostArrays {
 public:
  std::byte* operator()(int64_t size_bytes) {
    buffers_.emplace_back(size_bytes / 16 + 1);
    return reinterpret_cast<std::byte*>(buffers_.back().data());
  }

 private:
  struct alignas(16) Line {
    std::byte bytes[16];
  };
  std::vector<std::vector<Line>> buffers_;
};

// Matrices of random elements that begin at a multiple of 16 bytes or, if shifted, one
// element after it.
class RandomMatrices {
 public:
  // `allocate` returns memory of a size in bytes, aligned to 16 bytes.
  RandomMatrices(std::function<std::byte*(int64_t)> allocate, Random& random)
      : allocate_(std::move(allocate)), random_(random) {}

  std::byte* Add(int64_t elements, DType dtype, bool shifted = false) {
    std::byte* data = allocate_((elements + 1) * SizeOf(dtype));
    if (shifted) data += SizeOf(dtype);
    for (int64_t i = 0; i < elements; ++i) {
      Write(data + i * SizeOf(dtype), dtype, RandomValue(random_, Values::kNormal));
    }
    return data;
  }

  std::byte* AddBytes(int64_t size_bytes) {
    std::byte* data = allocate_(size_bytes);
    for (int64_t i = 0; i < size_bytes; ++i) data[i] = std::byte(Pick(random_, 0, 255));
    return data;
  }

  Random& random() { return random_; }

 private:
  const std::function<std::byte*(int64_t)> allocate_;
  Random& random_;
};

// A kernel's parameters, the memory that it writes, and the bytes that this memory must
// have afterwards. Bytes between the rows of the result keep their values.
template <typename Params>
struct KernelCall {
  Params params = {};
  std::byte* out = nullptr;
  std::vector<std::byte> expected;

  bool IsRight() const { return std::equal(expected.begin(), expected.end(), out); }
};

inline uint64_t DeviceAddressOf(const std::byte* data) {
  return reinterpret_cast<uint64_t>(data);
}

// The expected sum has the CPU engine's bits.
inline KernelCall<SumParams> MakeSum(RandomMatrices& matrices) {
  Random& random = matrices.random();
  KernelCall<SumParams> call;
  SumParams& params = call.params;
  params.rows = Pick(random, 1, 5);
  params.columns = Pick(random, 1, 70);
  params.is_aligned = Pick(random, 0, 1);
  struct Added {
    std::byte* data;
    int64_t stride;
    int64_t span;  // elements from the first to the last
    DType dtype;
  };
  const auto add = [&](bool repeats) {
    const auto dtype = static_cast<DType>(Pick(random, 0, 2));
    int64_t stride = params.columns + Pick(random, 0, 3);
    if (params.is_aligned) stride = (stride + 7) / 8 * 8;
    const int64_t span = (params.rows - 1) * stride + params.columns;
    std::byte* data = matrices.Add(span, dtype, !params.is_aligned);
    return Added{data, repeats ? 0 : stride, span, dtype};
  };
  std::vector<ConstMatrix> parts;
  params.num_parts = static_cast<uint32_t>(Pick(random, 1, kMaxParts));
  for (uint32_t i = 0; i < params.num_parts; ++i) {
    const Added part = add(Pick(random, 0, 4) == 0);
    params.parts[i] = {DeviceAddressOf(part.data), part.stride, part.dtype};
    parts.push_back({part.data, part.stride, part.dtype});
  }
  const Added out = add(false);
  params.out = {DeviceAddressOf(out.data), out.stride, out.dtype};
  call.out = out.data;
  call.expected.assign(out.data, out.data + out.span * SizeOf(out.dtype));
  SumChunks(parts, params.rows, params.columns,
            {call.expected.data(), out.stride, out.dtype});
  return call;
}

// All sizes and strides are multiples of params.unit_bytes.
inline KernelCall<CopyParams> MakeCopy(RandomMatrices& matrices) {
  Random& random = matrices.random();
  KernelCall<CopyParams> call;
  const int64_t unit = int64_t{1} << Pick(random, 0, 4);
  const int64_t rows = Pick(random, 1, 5);
  const int64_t row_bytes = unit * Pick(random, 1, 40);
  const int64_t from_stride = row_bytes + unit * Pick(random, 0, 3);
  const int64_t to_stride = row_bytes + unit * Pick(random, 0, 3);
  const std::byte* from = matrices.AddBytes(rows * from_stride);
  call.out = matrices.AddBytes(rows * to_stride);
  call.expected.assign(call.out, call.out + rows * to_stride);
  CopyRows(from, from_stride, call.expected.data(), to_stride, rows, row_bytes);
  call.params = {.from = DeviceAddressOf(from),
                 .to = DeviceAddressOf(call.out),
                 .num_rows = rows,
                 .row_bytes = row_bytes,
                 .from_stride = from_stride,
                 .to_stride = to_stride,
                 .unit_bytes = static_cast<uint32_t>(unit)};
  return call;
}

inline KernelCall<TransposeParams> MakeTranspose(RandomMatrices& matrices) {
  Random& random = matrices.random();
  KernelCall<TransposeParams> call;
  const int64_t rows = kTransposedTile * Pick(random, 1, 9);
  const int64_t columns = kTransposedTile * Pick(random, 1, 19);
  const int64_t from_stride = columns + kTransposedTile * Pick(random, 0, 2);
  const int64_t to_stride = rows + kTransposedTile * Pick(random, 0, 2);
  const std::byte* from = matrices.AddBytes(rows * from_stride);
  call.out = matrices.AddBytes(columns * to_stride);
  call.expected.assign(call.out, call.out + columns * to_stride);
  for (int64_t r = 0; r < rows; ++r) {
    for (int64_t c = 0; c < columns; ++c) {
      call.expected[c * to_stride + r] = from[r * from_stride + c];
    }
  }
  call.params = {.from = DeviceAddressOf(from),
                 .to = DeviceAddressOf(call.out),
                 .rows = rows,
                 .columns = columns,
                 .from_stride = from_stride,
                 .to_stride = to_stride};
  return call;
}

}  // namespace jax_ub
