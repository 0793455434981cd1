// Calls cuBLASLt's functions, as emulated, with products of small integers.
#pragma once

#include <algorithm>
#include <array>
#include <cmath>
#include <random>
#include <vector>

#include "check.h"
#include "cuda/emulated_cublaslt.h"
#include "cuda/emulated_driver.h"
#include "cuda/emulated_gpu.h"
#include "random_gemm.h"

namespace jax_ub::library_calls {

inline const Driver& driver = EmulatedDriver();
inline const CublasLt& library = EmulatedCublasLt();
using Gpu = EmulatedGpu;
using lt::Status;

// A batch of column-major matrices of small integers, in host memory that devices can
// access.
struct Matrix {
  Matrix(
      DType dtype, int64_t rows, int64_t columns, int64_t gap, int batch, bool repeats)
      : dtype(dtype),
        rows(rows),
        columns(columns),
        leading(rows + gap),
        stride(repeats ? 0 : leading * columns),
        batch(batch),
        memory(driver, leading * columns * batch * SizeOf(dtype)) {
    Check(
        library,
        library.MatrixLayoutCreate(&layout, DataTypeOf(dtype), rows, columns, leading),
        "layout");
    if (batch == 1) return;
    Set(lt::LayoutAttribute::kBatchCount, int32_t{batch});
    Set(lt::LayoutAttribute::kStridedBatchOffset, stride);
  }
  ~Matrix() { library.MatrixLayoutDestroy(layout); }
  Matrix(const Matrix&) = delete;

  template <typename Value>
  void Set(lt::LayoutAttribute attribute, Value value) {
    Check(library,
          library.MatrixLayoutSetAttribute(layout, attribute, &value, sizeof(value)),
          "attribute");
  }
  std::byte* At(int64_t b, int64_t row, int64_t column) const {
    return static_cast<std::byte*>(memory.get()) +
           (b * stride + column * leading + row) * SizeOf(dtype);
  }
  float Get(int64_t b, int64_t row, int64_t column) const {
    return Read(At(b, row, column), dtype);
  }
  void Randomize(std::mt19937& random) {
    for (int64_t i = 0; i < leading * columns * batch; ++i) {
      Write(static_cast<std::byte*>(memory.get()) + i * SizeOf(dtype), dtype,
            static_cast<float>(static_cast<int>(random() % 7) - 3));
    }
  }

  DType dtype;
  int64_t rows, columns, leading, stride;
  int batch;
  HostMemory memory;
  lt::Layout layout = nullptr;
};

// The matrices of FP8 products have no gaps, since their strides must be multiples of 16
// bytes.
struct Options {
  bool is_fp8() const { return IsFp8(operands.a) || IsFp8(operands.b); }

  OperandDTypes operands = DType::kBF16;
  DType results = DType::kBF16;
  bool transpose_a = false, transpose_b = false;
  int64_t m = 5, n = 7, k = 9;
  int batch = 1;
  bool repeats_b = false;
  bool has_bias = false;
  bool has_scales = false;
  bool has_row_scales = false;
  bool has_block_scales = false;
  float alpha = 1, beta = 0;
  uint64_t workspace_bytes = 0;
  lt::ComputeType compute = lt::ComputeType::k32F;
};

// A product with its descriptors, matrices and workspace.
class Product {
 public:
  explicit Product(const Options& options)
      : o(options),
        a(o.operands.a,
          o.transpose_a ? o.k : o.m,
          o.transpose_a ? o.m : o.k,
          o.is_fp8() ? 0 : 3,
          o.batch,
          false),
        b(o.operands.b,
          o.transpose_b ? o.n : o.k,
          o.transpose_b ? o.k : o.n,
          0,
          o.batch,
          o.repeats_b),
        c(o.results, o.m, o.n, o.is_fp8() ? 0 : 1, o.batch, false),
        d(o.results, o.m, o.n, o.is_fp8() ? 0 : 2, o.batch, false),
        bias(o.results, o.m, 1, 0, o.batch, false),
        workspace(driver, 8 << 20),
        stream(driver, 0) {
    Check(library, library.Create(&handle), "handle");
    Check(library, library.MatmulDescCreate(&desc, o.compute, lt::DataType::kF32),
          "desc");
    Set(lt::DescAttribute::kTransA, int32_t{o.transpose_a});
    Set(lt::DescAttribute::kTransB, int32_t{o.transpose_b});
    if (o.has_block_scales) {
      const auto mode = static_cast<int32_t>(lt::ScaleMode::kVec32);
      FillTiles(a_tiles, o.m);
      FillTiles(b_tiles, o.n);
      Set(lt::DescAttribute::kAScaleMode, mode);
      Set(lt::DescAttribute::kBScaleMode, mode);
      Set(lt::DescAttribute::kAScalePointer, a_tiles.get());
      Set(lt::DescAttribute::kBScalePointer, b_tiles.get());
    }
    if (o.has_scales) {
      for (int64_t i = 0; i < o.m; ++i) {
        Write(a_scales.At(0, i, 0), DType::kF32, i % 2 == 0 ? 0.25f : 0.5f);
      }
      for (int64_t i = 0; i < o.n; ++i) {
        Write(b_scales.At(0, i, 0), DType::kF32, i % 3 == 0 ? 8.0f : 2.0f);
      }
      Set(lt::DescAttribute::kAScalePointer, a_scales.memory.get());
      Set(lt::DescAttribute::kBScalePointer, b_scales.memory.get());
    }
    if (o.has_row_scales) {
      const auto mode = static_cast<int32_t>(lt::ScaleMode::kOuterVector);
      Set(lt::DescAttribute::kAScaleMode, mode);
      Set(lt::DescAttribute::kBScaleMode, mode);
    }
    if (o.has_bias) {
      Set(lt::DescAttribute::kEpilogue, static_cast<uint32_t>(lt::Epilogue::kBias));
      Set(lt::DescAttribute::kBiasPointer, static_cast<const void*>(bias.memory.get()));
      Set(lt::DescAttribute::kBiasBatchStride, bias.stride);
    }
    Check(library, library.MatmulPreferenceCreate(&preference), "preference");
    Prefer(lt::PreferenceAttribute::kMaxWorkspaceBytes, o.workspace_bytes);
  }
  ~Product() {
    library.MatmulPreferenceDestroy(preference);
    library.MatmulDescDestroy(desc);
    library.Destroy(handle);
  }
  Product(const Product&) = delete;

  template <typename Value>
  void Set(lt::DescAttribute attribute, Value value) {
    Check(library,
          library.MatmulDescSetAttribute(desc, attribute, &value, sizeof(value)),
          "attribute");
  }
  template <typename Value>
  void Prefer(lt::PreferenceAttribute attribute, Value value) {
    Check(library,
          library.MatmulPreferenceSetAttribute(preference, attribute, &value,
                                               sizeof(value)),
          "attribute");
  }

  Status Find() {
    found = {};
    num_found = 0;
    return library.MatmulAlgoGetHeuristic(handle, desc, a.layout, b.layout, c.layout,
                                          d.layout, preference, 3, found.data(),
                                          &num_found);
  }
  Status Run(int64_t d_offset_bytes = 0, size_t workspace_bytes = 8 << 20) {
    return library.Matmul(handle, desc, &o.alpha, a.memory.get(), a.layout,
                          b.memory.get(), b.layout, &o.beta, c.memory.get(), c.layout,
                          static_cast<std::byte*>(d.memory.get()) + d_offset_bytes,
                          d.layout, &found[0].algorithm,
                          reinterpret_cast<void*>(workspace.get()), workspace_bytes,
                          stream.get());
  }
  // The scale of 32 elements along k. It differs between neighbouring rows and blocks.
  static int BlockExponent(int64_t row, int64_t block) {
    return static_cast<int>((row + 2 * block) % 3) - 1;
  }
  double Expected(int64_t i, int64_t row, int64_t column) const {
    double sum = 0;
    for (int64_t p = 0; p < o.k; ++p) {
      const double product =
          double{o.transpose_a ? a.Get(i, p, row) : a.Get(i, row, p)} *
          (o.transpose_b ? b.Get(i, column, p) : b.Get(i, p, column));
      const int exponent = BlockExponent(row, p / 32) + BlockExponent(column, p / 32);
      sum += o.has_block_scales ? std::ldexp(product, exponent) : product;
    }
    const auto scale = [&](const Matrix& scales, int64_t i) {
      return o.has_scales ? double{scales.Get(0, o.has_row_scales ? i : 0, 0)} : 1;
    };
    sum *= o.alpha * scale(a_scales, row) * scale(b_scales, column);
    if (o.beta != 0) sum += double{o.beta} * c.Get(i, row, column);
    return o.has_bias ? sum + bias.Get(i, row, 0) : sum;
  }

  // Returns the size in bytes of the scales of blocks of `outer` rows.
  int64_t TileBytes(int64_t outer) const {
    return (outer + 127) / 128 * ((o.k + 127) / 128) * 512;
  }
  void FillTiles(const HostMemory& tiles, int64_t outer) const {
    auto* const bytes = static_cast<uint8_t*>(tiles.get());
    std::fill_n(bytes, TileBytes(outer), uint8_t{0});
    for (int64_t row = 0; row < outer; ++row) {
      for (int64_t block = 0; block < o.k / 32; ++block) {
        const int64_t tile = row / 128 * ((o.k + 127) / 128) + block / 4;
        bytes[512 * tile + row % 32 * 16 + row % 128 / 32 * 4 + block % 4] =
            static_cast<uint8_t>(127 + BlockExponent(row, block));
      }
    }
  }

  const Options o;
  Matrix a, b, c, d, bias;
  HostMemory a_tiles{driver, TileBytes(std::max<int64_t>(o.m, 1))};
  HostMemory b_tiles{driver, TileBytes(std::max<int64_t>(o.n, 1))};
  // The scales of A and of B: those of their rows and columns begin with one for all.
  Matrix a_scales{DType::kF32, std::max<int64_t>(o.m, 1), 1, 0, 1, false};
  Matrix b_scales{DType::kF32, std::max<int64_t>(o.n, 1), 1, 0, 1, false};
  DeviceMemory workspace;
  Stream stream;
  lt::Handle handle = nullptr;
  lt::MatmulDesc desc = nullptr;
  lt::Preference preference = nullptr;
  std::array<lt::HeuristicResult, 3> found = {};
  int num_found = 0;
};

// Checks that a product of small integers is exact, in any dtype and order.
inline void CheckExact(const Options& options, uint64_t seed) {
  Product product(options);
  std::mt19937 random(seed);
  for (Matrix* matrix : {&product.a, &product.b, &product.c, &product.bias}) {
    matrix->Randomize(random);
  }
  CHECK_EQ(static_cast<int>(product.Find()), 0);
  CHECK_EQ(static_cast<int>(product.Run()), 0);
  Gpu::Synchronize(product.stream.get());
  for (int64_t i = 0; i < options.batch; ++i) {
    for (int64_t row = 0; row < options.m; ++row) {
      for (int64_t column = 0; column < options.n; ++column) {
        CHECK_EQ(double{product.d.Get(i, row, column)},
                 product.Expected(i, row, column));
      }
    }
  }
}

inline bool Is(Status status, Status wanted) { return status == wanted; }

}  // namespace jax_ub::library_calls
