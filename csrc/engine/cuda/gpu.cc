#include "engine/cuda/gpu.h"

namespace jax_ub {

Gpu::Gpu(const Driver& driver, const CublasLt& library, int ordinal)
    : context_(driver, ordinal),
      num_sms_(context_.Attribute(CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT)) {
  const ScopedContext current(driver, context_.get());
  loaded_ = std::make_unique<Loaded>(library, context_);
}

}  // namespace jax_ub
