// Memory-bound kernels that sum, copy and transpose, as grid-stride loops over 16-byte
// accesses.
//
// A vector is eight elements of a row. Each thread loads kVectors vectors of an addend
// (SumPart) before it uses the first, so that the loads overlap. Each element is summed
// in f32 in the order of the addends, so the result does not depend on the threads, and
// has the same bits as on the CPU, except that the CPU flushes subnormal f32 numbers to
// zero.

#include "platform/cuda/instructions.cuh"
#include "reduce/cuda/elements.cuh"
#include "reduce/cuda/sum_params.h"

namespace jax_ub::gpu {
namespace {

constexpr int kLanes = 8;
constexpr int kVectors = 2;
constexpr int kUnits = 4;

// Iterates over a grid with `columns` columns in row-major order, `step` cells at a
// time. Divides only in the constructor, because integer division is slow on GPUs.
struct Walk {
  int64_t row;
  int64_t column;
  int64_t row_step;
  int64_t column_step;
  int64_t columns;

  __device__ Walk(int64_t first, int64_t step, int64_t columns)
      : row(first / columns),
        column(first % columns),
        row_step(step / columns),
        column_step(step % columns),
        columns(columns) {}

  __device__ void Next() {
    row += row_step;
    column += column_step;
    if (column >= columns) {
      column -= columns;
      ++row;
    }
  }
};

__device__ const char* AddressOf(const SumPart& part, int64_t row, int64_t column) {
  const int64_t element = row * part.row_stride + column;
  return reinterpret_cast<const char*>(part.data) +
         element * (part.dtype == DType::kF32 ? 4 : 2);
}

template <DType kDType>
__device__ void LoadVector(const char* from, float (&x)[kLanes]) {
  if constexpr (kDType == DType::kF32) {
    const float4 low = reinterpret_cast<const float4*>(from)[0];
    const float4 high = reinterpret_cast<const float4*>(from)[1];
    x[0] = low.x, x[1] = low.y, x[2] = low.z, x[3] = low.w;
    x[4] = high.x, x[5] = high.y, x[6] = high.z, x[7] = high.w;
  } else {
    const uint4 vector = *reinterpret_cast<const uint4*>(from);
    const uint32_t pairs[kLanes / 2] = {vector.x, vector.y, vector.z, vector.w};
    for (int i = 0; i < kLanes / 2; ++i) {
      const float2 wide =
          kDType == DType::kBF16 ? WidenBF16(pairs[i]) : WidenF16(pairs[i]);
      x[2 * i] = wide.x;
      x[2 * i + 1] = wide.y;
    }
  }
}

__device__ void StoreVector(char* to, DType dtype, const float (&x)[kLanes]) {
  if (dtype == DType::kF32) {
    reinterpret_cast<float4*>(to)[0] = {x[0], x[1], x[2], x[3]};
    reinterpret_cast<float4*>(to)[1] = {x[4], x[5], x[6], x[7]};
    return;
  }
  uint32_t pairs[kLanes / 2];
  for (int i = 0; i < kLanes / 2; ++i) {
    const float2 wide = {x[2 * i], x[2 * i + 1]};
    pairs[i] = dtype == DType::kBF16 ? NarrowBF16(wide) : NarrowF16(wide);
  }
  *reinterpret_cast<uint4*>(to) = {pairs[0], pairs[1], pairs[2], pairs[3]};
}

// Loads kCount vectors of kLanes elements of an addend. Issues all loads before it uses
// the first one.
template <DType kDType, int kCount>
__device__ void LoadVectors(const SumPart& part,
                            const int64_t (&rows)[kCount],
                            const int64_t (&columns)[kCount],
                            float (&x)[kCount][kLanes]) {
  for (int v = 0; v < kCount; ++v) {
    LoadVector<kDType>(AddressOf(part, rows[v], columns[v]), x[v]);
  }
}

// Sums the addends' vectors at kCount positions, and stores the results. Tests the
// dtype of each addend only once.
template <int kCount>
__device__ void SumVectors(const SumParams& params,
                           const int64_t (&rows)[kCount],
                           const int64_t (&columns)[kCount]) {
  float sums[kCount][kLanes];
  for (uint32_t i = 0; i < params.num_parts; ++i) {
    const SumPart& part = params.parts[i];
    float x[kCount][kLanes];
    if (part.dtype == DType::kF32) {
      LoadVectors<DType::kF32>(part, rows, columns, x);
    } else if (part.dtype == DType::kBF16) {
      LoadVectors<DType::kBF16>(part, rows, columns, x);
    } else {
      LoadVectors<DType::kF16>(part, rows, columns, x);
    }
    for (int v = 0; v < kCount; ++v) {
      for (int lane = 0; lane < kLanes; ++lane) {
        sums[v][lane] = i == 0 ? x[v][lane] : sums[v][lane] + x[v][lane];
      }
    }
  }
  for (int v = 0; v < kCount; ++v) {
    StoreVector(const_cast<char*>(AddressOf(params.out, rows[v], columns[v])),
                params.out.dtype, sums[v]);
  }
}

__device__ void SumElement(const SumParams& params, int64_t row, int64_t column) {
  const auto load = [&](const SumPart& part) {
    return LoadElement(part.data, row * part.row_stride + column, part.dtype);
  };
  float sum = load(params.parts[0]);
  for (uint32_t i = 1; i < params.num_parts; ++i) sum += load(params.parts[i]);
  StoreElement(params.out.data, row * params.out.row_stride + column, params.out.dtype,
               sum);
}

template <typename Unit>
__device__ void CopyUnits(const CopyParams& params, int64_t first, int64_t step) {
  const int64_t columns = params.row_bytes / static_cast<int64_t>(sizeof(Unit));
  const int64_t count = params.num_rows * columns;
  Walk walk(first, step, columns);
  const auto from = [&] {
    return reinterpret_cast<const Unit*>(params.from + walk.row * params.from_stride) +
           walk.column;
  };
  const auto to = [&] {
    return reinterpret_cast<Unit*>(params.to + walk.row * params.to_stride) +
           walk.column;
  };
  int64_t at = first;
  for (; at + (kUnits - 1) * step < count; at += kUnits * step) {
    Unit units[kUnits];
    Unit* targets[kUnits];
    for (int i = 0; i < kUnits; ++i) {
      units[i] = *from();
      targets[i] = to();
      walk.Next();
    }
    for (int i = 0; i < kUnits; ++i) *targets[i] = units[i];
  }
  for (; at < count; at += step) {
    *to() = *from();
    walk.Next();
  }
}

// Transposes 4 x 4 bytes: byte c of rows[r] becomes byte r of columns[c].
__device__ void TransposeBytes(const uint32_t (&rows)[4], uint32_t (&columns)[4]) {
  // `low` combines bytes 0 and 1 of rows 0 and 1, and of rows 2 and 3. `high` combines
  // bytes 2 and 3 of these rows.
  const uint32_t low[2] = {PermuteBytes(rows[0], rows[1], 0x5140),
                           PermuteBytes(rows[2], rows[3], 0x5140)};
  const uint32_t high[2] = {PermuteBytes(rows[0], rows[1], 0x7362),
                            PermuteBytes(rows[2], rows[3], 0x7362)};
  columns[0] = PermuteBytes(low[0], low[1], 0x5410);
  columns[1] = PermuteBytes(low[0], low[1], 0x7632);
  columns[2] = PermuteBytes(high[0], high[1], 0x5410);
  columns[3] = PermuteBytes(high[0], high[1], 0x7632);
}

// Transposes the tile of 16 x 16 bytes that begins at row 16 * `row` and column 16 *
// `column`.
__device__ void TransposeTile(const TransposeParams& params,
                              int64_t row,
                              int64_t column) {
  constexpr int kWords = kTransposedTile / 4;
  const char* const from = reinterpret_cast<const char*>(params.from) +
                           kTransposedTile * (row * params.from_stride + column);
  char* const to = reinterpret_cast<char*>(params.to) +
                   kTransposedTile * (column * params.to_stride + row);
  uint32_t words[kTransposedTile][kWords];
  for (int r = 0; r < kTransposedTile; ++r) {
    const uint4 line = *reinterpret_cast<const uint4*>(from + r * params.from_stride);
    words[r][0] = line.x, words[r][1] = line.y;
    words[r][2] = line.z, words[r][3] = line.w;
  }
  for (int word = 0; word < kWords; ++word) {
    uint32_t lines[4][kWords];  // rows 4 * word to 4 * word + 3 of the result
    for (int part = 0; part < kWords; ++part) {
      const uint32_t rows[4] = {words[4 * part][word], words[4 * part + 1][word],
                                words[4 * part + 2][word], words[4 * part + 3][word]};
      uint32_t columns[4];
      TransposeBytes(rows, columns);
      for (int i = 0; i < 4; ++i) lines[i][part] = columns[i];
    }
    for (int i = 0; i < 4; ++i) {
      const uint4 line = {lines[i][0], lines[i][1], lines[i][2], lines[i][3]};
      *reinterpret_cast<uint4*>(to + (4 * word + i) * params.to_stride) = line;
    }
  }
}

}  // namespace

extern "C" __global__ void __launch_bounds__(kSumThreads, 7)
    jax_ub_sum(const __grid_constant__ SumParams params) {
  const int64_t first = blockIdx.x * int64_t{blockDim.x} + threadIdx.x;
  const int64_t step = gridDim.x * int64_t{blockDim.x};
  const int64_t vectors = params.is_aligned ? params.columns / kLanes : 0;
  if (vectors > 0) {
    const int64_t count = params.rows * vectors;
    Walk walk(first, step, vectors);
    int64_t at = first;
    for (; at + (kVectors - 1) * step < count; at += kVectors * step) {
      int64_t rows[kVectors];
      int64_t columns[kVectors];
      for (int v = 0; v < kVectors; ++v) {
        rows[v] = walk.row;
        columns[v] = walk.column * kLanes;
        walk.Next();
      }
      SumVectors<kVectors>(params, rows, columns);
    }
    for (; at < count; at += step) {
      SumVectors<1>(params, {walk.row}, {walk.column * kLanes});
      walk.Next();
    }
  }
  const int64_t rest = params.columns - vectors * kLanes;
  if (rest == 0) return;
  Walk walk(first, step, rest);
  for (int64_t at = first; at < params.rows * rest; at += step) {
    SumElement(params, walk.row, vectors * kLanes + walk.column);
    walk.Next();
  }
}

extern "C" __global__ void __launch_bounds__(kCopyThreads, 2)
    jax_ub_copy(const __grid_constant__ CopyParams params) {
  const int64_t first = blockIdx.x * int64_t{blockDim.x} + threadIdx.x;
  const int64_t step = gridDim.x * int64_t{blockDim.x};
  switch (params.unit_bytes) {
    case 16:
      return CopyUnits<uint4>(params, first, step);
    case 8:
      return CopyUnits<uint2>(params, first, step);
    case 4:
      return CopyUnits<uint32_t>(params, first, step);
    case 2:
      return CopyUnits<uint16_t>(params, first, step);
    default:
      return CopyUnits<uint8_t>(params, first, step);
  }
}

extern "C" __global__ void __launch_bounds__(kTransposeThreads)
    jax_ub_transpose(const __grid_constant__ TransposeParams params) {
  constexpr int kWarp = kPatchRows * kPatchColumns;
  const int64_t tile_rows = params.rows / kTransposedTile;
  const int64_t tile_columns = params.columns / kTransposedTile;
  const int64_t patch_columns = (tile_columns + kPatchColumns - 1) / kPatchColumns;
  const int64_t num_patches = (tile_rows + kPatchRows - 1) / kPatchRows * patch_columns;
  const int64_t first = blockIdx.x * int64_t{blockDim.x} + threadIdx.x;
  const int64_t step = gridDim.x * int64_t{blockDim.x} / kWarp;
  const int64_t lane = first % kWarp;
  Walk walk(first / kWarp, step, patch_columns);
  for (int64_t patch = first / kWarp; patch < num_patches; patch += step) {
    const int64_t row = walk.row * kPatchRows + lane / kPatchColumns;
    const int64_t column = walk.column * kPatchColumns + lane % kPatchColumns;
    if (row < tile_rows && column < tile_columns) TransposeTile(params, row, column);
    walk.Next();
  }
}

}  // namespace jax_ub::gpu
