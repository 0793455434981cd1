// The resources of the engine on one GPU: context, kernels, GEMM plans and streams.
#pragma once

#include <memory>
#include <mutex>
#include <optional>

#include "engine/cuda/stream_device.h"
#include "engine/cuda/stream_lanes.h"
#include "gemm/cuda/cublaslt.h"
#include "gemm/cuda/cuda_gemm.h"
#include "gemm/cuda/fp8_support.h"
#include "platform/cuda/driver.h"
#include "platform/cuda/owners.h"
#include "reduce/cuda/sum_kernels.h"
#include "transport/cuda/all_reduce_kernel.h"
#include "transport/cuda/flag_kernels.h"
#include "transport/cuda/multicast_kernels.h"

namespace jax_ub {

// Returns whether GEMMs must not run concurrently on GPUs of compute capability
// `major`.x. On 10.x and 11.x, many kernels of cuBLAS 12.8 to 13.1 free their tensor
// memory more than once, which corrupts kernels on other streams. JAX's CUDA plugin
// warns about this defect.
bool MayCorruptConcurrentGemms(const CublasLt& library, int major);

class Gpu {
 public:
  // Loads all kernels. If a kernel were loaded later, the load could deadlock with a
  // wait kernel that is running. Loads the multicast kernels if `nvls` is set and the
  // device supports multicast.
  Gpu(const Driver& driver, const CublasLt& library, int ordinal, bool nvls = false);

  CUcontext context() const { return context_.get(); }
  const Driver& driver() const { return context_.driver(); }
  const FlagKernels& flags() const { return loaded_->flags; }
  const SumKernels& sums() const { return loaded_->sums; }
  const AllReduceKernel& all_reduce() const { return loaded_->all_reduce; }
  const MulticastKernels* multicast() const {
    return loaded_->multicast ? &*loaded_->multicast : nullptr;
  }
  CudaGemm& gemm() { return loaded_->gemm; }
  StreamResources resources() { return {driver(), sums(), gemm()}; }
  int num_sms() const { return num_sms_; }
  const ComputeCapability& capability() const { return capability_; }

  // A call holds this mutex while it enqueues its work, because only one call at a time
  // may use the lanes (streams).
  std::mutex& mutex() { return mutex_; }
  LanePool& lanes() { return loaded_->lanes; }  // guarded by mutex()

 private:
  struct Loaded {
    Loaded(const CublasLt& library,
           const Context& context,
           bool has_multicast,
           bool gemms_in_turn)
        : flags(context.driver()),
          sums(context.driver(), context.device()),
          all_reduce(context.driver()),
          gemm(library, context.driver(), sums),
          lanes(context.driver(), gemms_in_turn) {
      if (has_multicast) multicast.emplace(context.driver());
    }
    const FlagKernels flags;
    const SumKernels sums;
    const AllReduceKernel all_reduce;
    CudaGemm gemm;
    LanePool lanes;
    std::optional<MulticastKernels> multicast;
  };

  const Context context_;
  const int num_sms_;
  const ComputeCapability capability_;
  std::unique_ptr<Loaded> loaded_;  // constructed while the context is current
  std::mutex mutex_;
};

}  // namespace jax_ub
