// What a plan of a product asks cuBLASLt's heuristics for.
#include <cstdint>
#include <cstring>

#include "check.h"
#include "cuda/emulated_cublaslt.h"
#include "cuda/emulated_driver.h"
#include "cuda/emulated_gpu.h"
#include "gemm/cuda/gemm_plan_cache.h"

namespace jax_ub {
namespace {

uint32_t allowed_schemes = 0;

// The reduction schemes that a product with this result may have.
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
  key.operand_dtype = DType::kBF16;
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

}  // namespace
}  // namespace jax_ub

CHECK_MAIN()
