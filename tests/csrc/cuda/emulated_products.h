// Matrix products as cuBLASLt describes them, and their computation on the host.
#pragma once

#include <array>
#include <cstdint>
#include <set>
#include <string>
#include <vector>

#include "cuda/emulated_memory.h"
#include "gemm/cuda/cublaslt.h"
#include "gemm/cuda/fp8_support.h"

namespace jax_ub {

namespace lt {

struct HandleObject {
  int device = 0;
  ComputeCapability capability = {};
  std::set<std::string> loaded =
      {};  // what algorithms need, each with beta and without
};

struct MatmulDescObject {
  ComputeType compute = ComputeType::k32F;
  int32_t transpose_a = 0;
  int32_t transpose_b = 0;
  uint32_t epilogue = static_cast<uint32_t>(Epilogue::kDefault);
  const void* bias = nullptr;
  int64_t bias_batch_stride = 0;
  int32_t sm_count_target = 0;
  int32_t bias_type = -1;
  const void* a_scale = nullptr;
  const void* b_scale = nullptr;
  int32_t a_scale_mode = 0;
  int32_t b_scale_mode = 0;
};

struct LayoutObject {
  DataType type = DataType::kF32;
  int64_t rows = 0;
  int64_t columns = 0;
  int64_t leading = 0;
  int32_t batch = 1;
  int64_t batch_stride = 0;

  bool operator==(const LayoutObject&) const = default;
};

struct PreferenceObject {
  uint64_t workspace_bytes = 0;
  uint32_t reduction_schemes = static_cast<uint32_t>(ReductionScheme::kAll);
  std::array<uint32_t, 4> alignments = {256, 256, 256, 256};  // of A, B, C, D
};

}  // namespace lt

namespace emulated {

inline bool IsFp8(lt::DataType type) {
  return type == lt::DataType::kE4M3 || type == lt::DataType::kE5M2;
}

inline int64_t ElementBytes(lt::DataType type) {
  return type == lt::DataType::kF32 ? 4 : IsFp8(type) ? 1 : 2;
}

// The device and the version of cuBLASLt that a product runs on.
struct Platform {
  ComputeCapability capability;
  size_t version = 0;
};

// A matrix product D[m, n] = A[m, k] B[k, n], with copies of its descriptors.
struct Product {
  lt::MatmulDescObject desc;
  lt::LayoutObject a, b, c, d;

  int64_t m() const { return d.rows; }
  int64_t n() const { return d.columns; }
  int64_t k() const { return desc.transpose_a != 0 ? a.rows : a.columns; }
  bool has_row_scales() const {
    return desc.a_scale_mode == static_cast<int32_t>(lt::ScaleMode::kOuterVector);
  }
  bool has_block_scales() const {
    return desc.a_scale_mode == static_cast<int32_t>(lt::ScaleMode::kVec32);
  }
  bool has_bias() const {
    return desc.epilogue == static_cast<uint32_t>(lt::Epilogue::kBias);
  }
  lt::DataType bias_type() const {
    return desc.bias_type < 0 ? d.type : static_cast<lt::DataType>(desc.bias_type);
  }
  // Returns a hash of the product, which identifies the product that an algorithm was
  // found for.
  uint64_t Fingerprint() const;
};

// Returns kInvalidValue if the descriptors are inconsistent, and kNotSupported if
// cuBLASLt has no kernels for the types. For FP8 operands it also depends on the
// layouts and sizes.
lt::Status CheckProduct(const Product& product, const Platform& platform);

// Returns whether there are kernels for matrices with these alignments, in bytes. As in
// cuBLASLt, epilogues and a separate C need more than the plain product: all matrices
// aligned to 4 bytes, or to 16 if the result has another type than the operands, and a
// bias aligned to 16. Products of FP8 operands need 16 for all.
bool HasKernels(const Product& product,
                const std::array<uint32_t, 4>& alignments,
                uint64_t bias_alignment);

// The arguments of a matmul call.
struct Arguments {
  float alpha = 1;
  float beta = 0;
  const void* a = nullptr;
  const void* b = nullptr;
  const void* c = nullptr;
  void* d = nullptr;
  void* workspace = nullptr;
  size_t needed_bytes = 0;
};

// Returns the memory that a matmul reads and writes.
std::vector<Touch> TouchesOf(const Product& product, const Arguments& arguments);

// Computes the product with f32 sums, in the order of the contraction, and rounds the
// result once.
void Multiply(const Product& product, const Arguments& arguments);

}  // namespace emulated

}  // namespace jax_ub
