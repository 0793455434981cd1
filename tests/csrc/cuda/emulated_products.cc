#include "cuda/emulated_products.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstddef>
#include <initializer_list>
#include <stdexcept>

#include "matrix.h"
#include "random_gemm.h"

namespace jax_ub::emulated {

using lt::Status;

namespace {

DType TypeOf(lt::DataType type) {
  for (const DTypeInfo& info : kDTypes) {
    if (info.is_operand && DataTypeOf(info.dtype) == type) return info.dtype;
  }
  throw std::logic_error("unknown type of a matrix");
}

bool AreMultiples(std::initializer_list<int64_t> sizes_bytes) {
  return std::ranges::all_of(sizes_bytes, [](int64_t size) { return size % 16 == 0; });
}

// Returns whether cuBLASLt has kernels for a product with an FP8 operand, by the tables
// of cublasLtMatmul() in its documentation.
bool HasFp8Kernels(const Product& product, const Platform& platform) {
  const auto& [desc, a, b, c, d] = product;
  const ComputeCapability& device = platform.capability;
  if (device < ComputeCapability{8, 9}) return false;
  if (device == ComputeCapability{8, 9} && platform.version < 120103) return false;
  if (!IsFp8(a.type) || !IsFp8(b.type)) return false;
  if (a.type == lt::DataType::kE5M2 && b.type == lt::DataType::kE5M2) return false;
  if (c.type != d.type || IsFp8(d.type)) return false;
  if (desc.compute != lt::ComputeType::k32F) return false;
  if (product.has_bias()) {
    // The bias of an f32 result is bf16.
    const auto wanted =
        d.type == lt::DataType::kF16 ? lt::DataType::kF16 : lt::DataType::kBF16;
    if (product.bias_type() != wanted) return false;
  }
  if (desc.a_scale_mode != desc.b_scale_mode) return false;
  const bool has_all_layouts = device.major == 10 || device.major == 11;
  if (product.has_row_scales() || product.has_block_scales()) {
    const bool is_supported =
        product.has_row_scales()
            ? device == ComputeCapability{9, 0} && platform.version >= 120900
            : has_all_layouts && platform.version >= 120800 && product.k() % 32 == 0;
    if (!is_supported) return false;
    if (desc.a_scale == nullptr || desc.b_scale == nullptr || d.batch > 1) return false;
    if (reinterpret_cast<uintptr_t>(desc.a_scale) % 16 != 0 ||
        reinterpret_cast<uintptr_t>(desc.b_scale) % 16 != 0) {
      return false;
    }
  } else if (desc.a_scale_mode != static_cast<int32_t>(lt::ScaleMode::kScalar)) {
    return false;
  }
  if (!has_all_layouts && (desc.transpose_a != 1 || desc.transpose_b != 0))
    return false;
  const int64_t result_bytes = ElementBytes(d.type);
  return AreMultiples({a.rows, a.leading, a.batch_stride, b.rows, b.leading,
                       b.batch_stride, d.rows * result_bytes, c.leading * result_bytes,
                       d.leading * result_bytes, c.batch_stride * result_bytes,
                       d.batch_stride * result_bytes});
}

// Rounds f32 to 10 bits of mantissa, to nearest even, as tensor cores read it.
float RoundToTf32(float value) {
  uint32_t bits = std::bit_cast<uint32_t>(value);
  bits += 0xFFF + ((bits >> 13) & 1);
  return std::bit_cast<float>(bits & ~uint32_t{0x1FFF});
}

// Returns the number of bytes of the scales of blocks of a matrix: tiles of 128 rows of
// op(A), or columns of op(B), by 128 elements along k.
int64_t BlockScaleBytes(int64_t outer, int64_t k) {
  return (outer + 127) / 128 * ((k + 127) / 128) * 512;
}

// Returns the scales of blocks as f32 [outer, k / 32]. They are NaN if a byte of the
// tiles that belongs to no block is not zero, because kernels may read it.
std::vector<float> ReadBlockScales(const void* data, int64_t outer, int64_t k) {
  const auto* const bytes = static_cast<const uint8_t*>(data);
  const int64_t num_blocks = k / 32;
  const int64_t tiles_along_k = (num_blocks + 3) / 4;
  std::vector<float> scales(outer * num_blocks);
  bool is_padded = true;
  for (int64_t i = 0; i < BlockScaleBytes(outer, k); ++i) {
    const int64_t tile = i / 512, line = i % 512 / 16, quarter = i % 16 / 4;
    const int64_t row = tile / tiles_along_k * 128 + quarter * 32 + line;
    const int64_t block = tile % tiles_along_k * 4 + i % 4;
    if (row < outer && block < num_blocks) {
      scales[row * num_blocks + block] =
          bytes[i] == 255 ? std::nanf("") : std::ldexp(1.0f, bytes[i] - 127);
    } else {
      is_padded &= bytes[i] == 0;
    }
  }
  if (!is_padded) std::ranges::fill(scales, std::nanf(""));
  return scales;
}

// Returns op(matrix) [rows, columns] as row-major floats.
std::vector<float> ReadDense(const void* data,
                             const lt::LayoutObject& layout,
                             int64_t batch,
                             bool transpose,
                             bool is_tf32) {
  const int64_t size = ElementBytes(layout.type);
  const DType type = TypeOf(layout.type);
  const auto* const base =
      static_cast<const std::byte*>(data) + batch * layout.batch_stride * size;
  const int64_t columns = transpose ? layout.rows : layout.columns;
  std::vector<float> dense(layout.rows * layout.columns);
  for (int64_t j = 0; j < layout.columns; ++j) {
    for (int64_t i = 0; i < layout.rows; ++i) {
      const float value = Read(base + (i + j * layout.leading) * size, type);
      dense[transpose ? j * columns + i : i * columns + j] =
          is_tf32 ? RoundToTf32(value) : value;
    }
  }
  return dense;
}

void MultiplyOne(const Product& product, const Arguments& arguments, int64_t batch) {
  const auto& [desc, a_layout, b_layout, c_layout, d_layout] = product;
  const int64_t m = product.m(), n = product.n(), k = product.k();
  const bool is_tf32 = desc.compute == lt::ComputeType::k32FFastTF32;
  auto a = ReadDense(arguments.a, a_layout, batch, desc.transpose_a != 0, is_tf32);
  auto b = ReadDense(arguments.b, b_layout, batch, desc.transpose_b != 0, is_tf32);
  if (product.has_block_scales()) {
    const auto a_scales = ReadBlockScales(desc.a_scale, m, k);
    const auto b_scales = ReadBlockScales(desc.b_scale, n, k);
    for (int64_t i = 0; i < m * k; ++i) a[i] *= a_scales[i / 32];
    for (int64_t i = 0; i < k * n; ++i) {
      b[i] *= b_scales[(i % n * k + i / n) / 32];
    }
  }
  std::vector<float> sums(m * n, 0.0f);
  jax_ub_test::AddProduct(a.data(), b.data(), m, n, k, sums.data());
  const bool has_rows = product.has_row_scales();
  const bool has_factors = !product.has_block_scales();
  const auto scale = [=](const void* scales, int64_t i) {
    if (scales == nullptr || !has_factors) return 1.0f;
    return static_cast<const float*>(scales)[has_rows ? i : 0];
  };
  const DType type = TypeOf(d_layout.type);
  const int64_t size = ElementBytes(d_layout.type);
  const auto at = [&](const lt::LayoutObject& layout, int64_t i, int64_t j) {
    return (batch * layout.batch_stride + i + j * layout.leading) * size;
  };
  for (int64_t j = 0; j < n; ++j) {
    for (int64_t i = 0; i < m; ++i) {
      float value = arguments.alpha * scale(desc.a_scale, i) * scale(desc.b_scale, j) *
                    sums[i * n + j];
      if (arguments.beta != 0) {
        const auto* const c = static_cast<const std::byte*>(arguments.c);
        value += arguments.beta * Read(c + at(c_layout, i, j), type);
      }
      if (product.has_bias()) {
        const auto* const bias = static_cast<const std::byte*>(desc.bias);
        const lt::DataType from = product.bias_type();
        value += Read(bias + (batch * desc.bias_batch_stride + i) * ElementBytes(from),
                      TypeOf(from));
      }
      Write(static_cast<std::byte*>(arguments.d) + at(d_layout, i, j), type, value);
    }
  }
}

void AddTouches(std::vector<Touch>& touches,
                const void* data,
                const lt::LayoutObject& layout) {
  const int64_t size = ElementBytes(layout.type);
  for (int64_t batch = 0; batch < layout.batch; ++batch) {
    touches.push_back(
        {reinterpret_cast<uint64_t>(data) + batch * layout.batch_stride * size,
         layout.columns, layout.rows * size, layout.leading * size});
  }
}

}  // namespace

uint64_t Product::Fingerprint() const {
  uint64_t hash = 1469598103934665603u;
  const auto mix = [&](int64_t value) {
    hash = (hash ^ static_cast<uint64_t>(value)) * 1099511628211u;
  };
  for (const auto* layout : {&a, &b, &c, &d}) {
    for (const int64_t value :
         {static_cast<int64_t>(layout->type), layout->rows, layout->columns,
          layout->leading, static_cast<int64_t>(layout->batch), layout->batch_stride}) {
      mix(value);
    }
  }
  for (const int64_t value :
       {static_cast<int64_t>(desc.compute), static_cast<int64_t>(desc.transpose_a),
        static_cast<int64_t>(desc.transpose_b), static_cast<int64_t>(desc.epilogue),
        static_cast<int64_t>(desc.sm_count_target),
        static_cast<int64_t>(desc.a_scale != nullptr),
        static_cast<int64_t>(desc.b_scale != nullptr),
        static_cast<int64_t>(desc.a_scale_mode),
        static_cast<int64_t>(desc.b_scale_mode)}) {
    mix(value);
  }
  return hash;
}

Status CheckProduct(const Product& product, const Platform& platform) {
  const auto& [desc, a, b, c, d] = product;
  for (const auto* layout : {&a, &b, &c, &d}) {
    if (layout->rows <= 0 || layout->columns <= 0 || layout->leading < layout->rows ||
        layout->batch != d.batch || layout->batch < 1 || layout->batch_stride < 0) {
      return Status::kInvalidValue;
    }
  }
  const auto rows = [](const lt::LayoutObject& l, int32_t t) {
    return t ? l.columns : l.rows;
  };
  const auto columns = [](const lt::LayoutObject& l, int32_t t) {
    return t ? l.rows : l.columns;
  };
  if (desc.transpose_a < 0 || desc.transpose_a > 1 || desc.transpose_b < 0 ||
      desc.transpose_b > 1 || rows(a, desc.transpose_a) != d.rows ||
      columns(b, desc.transpose_b) != d.columns ||
      columns(a, desc.transpose_a) != rows(b, desc.transpose_b) || c.rows != d.rows ||
      c.columns != d.columns) {
    return Status::kInvalidValue;
  }
  if (d.batch > 1 && d.batch_stride == 0) return Status::kInvalidValue;
  if ((desc.a_scale != nullptr && !IsFp8(a.type)) ||
      (desc.b_scale != nullptr && !IsFp8(b.type))) {
    return Status::kInvalidValue;
  }
  if (IsFp8(a.type) || IsFp8(b.type)) {
    return HasFp8Kernels(product, platform) ? Status::kSuccess : Status::kNotSupported;
  }
  const bool is_tf32 = desc.compute == lt::ComputeType::k32FFastTF32;
  const bool has_kernels =
      a.type == b.type && c.type == d.type &&
      (d.type == lt::DataType::kF32 || d.type == a.type) &&
      (!is_tf32 || a.type == lt::DataType::kF32) &&
      (product.has_bias() ||
       desc.epilogue == static_cast<uint32_t>(lt::Epilogue::kDefault)) &&
      (!product.has_bias() || product.bias_type() == d.type);
  return has_kernels ? Status::kSuccess : Status::kNotSupported;
}

bool HasKernels(const Product& product,
                const std::array<uint32_t, 4>& alignments,
                uint64_t bias_alignment) {
  if (IsFp8(product.a.type) && *std::ranges::min_element(alignments) < 16) return false;
  const bool is_plain =
      !product.has_bias() && product.c == product.d && alignments[2] == alignments[3];
  if (is_plain) return true;
  if (product.has_bias() && bias_alignment < 16) return false;
  const uint32_t needed = product.a.type == product.d.type ? 4 : 16;
  return *std::ranges::min_element(alignments) >= needed;
}

std::vector<Touch> TouchesOf(const Product& product, const Arguments& arguments) {
  std::vector<Touch> touches;
  AddTouches(touches, arguments.a, product.a);
  AddTouches(touches, arguments.b, product.b);
  AddTouches(touches, arguments.d, product.d);
  if (arguments.beta != 0) AddTouches(touches, arguments.c, product.c);
  if (product.has_bias()) {
    const int64_t size = ElementBytes(product.bias_type());
    touches.push_back({reinterpret_cast<uint64_t>(product.desc.bias), product.d.batch,
                       product.m() * size, product.desc.bias_batch_stride * size});
  }
  const auto add_scales = [&](const void* scales, int64_t count) {
    if (scales == nullptr) return;
    const int64_t size = product.has_row_scales() ? count : 1;
    const int64_t size_bytes = product.has_block_scales()
                                   ? BlockScaleBytes(count, product.k())
                                   : size * static_cast<int64_t>(sizeof(float));
    touches.push_back({reinterpret_cast<uint64_t>(scales), 1, size_bytes, 0});
  };
  add_scales(product.desc.a_scale, product.m());
  add_scales(product.desc.b_scale, product.n());
  if (arguments.needed_bytes > 0) {
    touches.push_back({reinterpret_cast<uint64_t>(arguments.workspace), 1,
                       static_cast<int64_t>(arguments.needed_bytes), 0});
  }
  return touches;
}

void Multiply(const Product& product, const Arguments& arguments) {
  for (int64_t i = 0; i < product.d.batch; ++i) MultiplyOne(product, arguments, i);
}

}  // namespace jax_ub::emulated
