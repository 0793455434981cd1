// Tests the descriptors that a GEMM plan passes to cuBLASLt.
#include <algorithm>
#include <cstdint>
#include <cstring>
#include <numeric>

#include "check.h"
#include "cuda/emulated_cublaslt.h"
#include "cuda/emulated_driver.h"
#include "cuda/emulated_gpu.h"
#include "gemm/cuda/gemm_plan_cache.h"
#include "platform/cuda/owners.h"

namespace jax_ub {
namespace {

uint32_t allowed_schemes = 0;

// Returns the reduction schemes that cuBLASLt may use for a product with this result
// dtype.
lt::ReductionScheme SchemesFor(DType result_dtype) {
  CublasLt library = EmulatedCublasLt();
  library.MatmulPreferenceSetAttribute = [](lt::Preference preference,
                                            lt::PreferenceAttribute attribute,
                                            const void* value, size_t size_bytes) {
    if (attribute == lt::PreferenceAttribute::kReductionSchemeMask) {
      std::memcpy(&allowed_schemes, value, sizeof(allowed_schemes));
    }
    return EmulatedCublasLt().MatmulPreferenceSetAttribute(preference, attribute, value,
                                                           size_bytes);
  };
  allowed_schemes = static_cast<uint32_t>(lt::ReductionScheme::kAll);
  MatmulKey key;
  key.a_dtype = key.b_dtype = DType::kBF16;
  key.result_dtype = result_dtype;
  key.m = key.n = key.k = 8;
  key.a = key.b = key.c = key.d = {8, 0, kPlannedAlignmentBytes};
  GemmPlanCache(library).Find(key);
  return static_cast<lt::ReductionScheme>(allowed_schemes);
}

TEST(PartialSumsAreNeverRoundedToADtypeOf16Bits) {
  const EmulatedMachine machine;
  const EmulatedGpu gpu;
  CHECK(SchemesFor(DType::kBF16) == lt::ReductionScheme::kComputeType);
  CHECK(SchemesFor(DType::kF32) == lt::ReductionScheme::kAll);
}

TEST(EachProductOfABatchHasItsOwnBias) {
  const EmulatedMachine machine;
  const EmulatedGpu gpu;
  constexpr int64_t kSize = 4, kMatrix = kSize * kSize, kBiasStride = 8;
  MatmulKey key;
  key.m = key.n = key.k = kSize;
  key.batch = 2;
  key.a = key.b = key.c = key.d = {kSize, kMatrix, 64};
  key.has_bias = true;
  key.bias_batch_stride = kBiasStride;
  const DeviceMemory memory(EmulatedDriver(), 6 * kMatrix * sizeof(float));
  auto* const operands = reinterpret_cast<float*>(memory.get());
  float* const biases = operands + 2 * kMatrix;
  float* const results = operands + 4 * kMatrix;
  std::fill_n(operands, 2 * kMatrix, 0.0f);
  std::iota(biases, biases + 2 * kBiasStride, 1.0f);
  MatmulArguments arguments;
  arguments.a = arguments.b = operands;
  arguments.bias = biases;
  arguments.c = arguments.d = results;
  GemmPlanCache plans(EmulatedCublasLt());
  const Stream stream(EmulatedDriver());
  plans.Find(key).Enqueue(arguments, 0, stream.get());
  EmulatedGpu::Synchronize(stream.get());
  for (int64_t b = 0; b < key.batch; ++b) {
    for (int64_t i = 0; i < kMatrix; ++i) {  // column by column
      CHECK_EQ(results[b * kMatrix + i], biases[b * kBiasStride + i % kSize]);
    }
  }
}

}  // namespace
}  // namespace jax_ub

CHECK_MAIN()
