#include "engine/cuda/gpu.h"

namespace jax_ub {

bool MayCorruptConcurrentGemms(const CublasLt& library, int major) {
  return (major == 10 || major == 11) && library.version >= 120800 &&
         library.version < 130200;
}

Gpu::Gpu(const Driver& driver, const CublasLt& library, int ordinal, bool nvls)
    : context_(driver, ordinal),
      num_sms_(context_.Attribute(CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT)),
      capability_{context_.Attribute(CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR),
                  context_.Attribute(CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR)} {
  const ScopedContext current(driver, context_.get());
  const bool has_multicast =
      nvls && context_.Attribute(CU_DEVICE_ATTRIBUTE_MULTICAST_SUPPORTED) != 0;
  loaded_ =
      std::make_unique<Loaded>(library, context_, has_multicast,
                               MayCorruptConcurrentGemms(library, capability_.major));
}

}  // namespace jax_ub
