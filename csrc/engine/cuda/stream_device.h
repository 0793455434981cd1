// Enqueues a rank's call on the streams of its GPU. Nothing is done yet when a function
// returns; all of it can be captured, and none of it is counted on the host.
//
//   XLA's stream ---begin-----------------------------------------------end--->
//   lane 0            +--put--signal--wait--put--signal--wait---------+--+
//   lane 1            +--product-------------------product------------+
//   lane 2            +-----------------product-----------------------+
#pragma once

#include <cuda.h>

#include <vector>

#include "engine/cuda/cuda_device.h"
#include "engine/cuda/stream_lanes.h"
#include "gemm/cuda/cuda_gemm.h"
#include "platform/cuda/driver.h"
#include "reduce/cuda/row_copies.h"
#include "reduce/cuda/sum_kernels.h"

namespace jax_ub {

// What a device enqueues with; all of it outlives the call.
struct StreamResources {
  const Driver& driver;
  const SumKernels& sums;
  CudaGemm& gemm;
};

CopyMethod CopyWayOf(const KernelOptions& kernel_options);

// One call. The context is current while it exists, and nobody else uses the lanes.
class StreamDevice : public CudaDevice {
 public:
  // The lanes begin behind what `stream` has been given. `workspace` has room for `plan`.
  StreamDevice(const StreamResources& kit,
               CUstream stream,
               StreamLanes& lanes,
               const KernelOptions& kernel_options,
               const GemmOptions& options,
               const WorkspacePlan& plan,
               const DeviceBytes& workspace);
  // All lanes are `stream` itself: for calls that communicate nothing.
  StreamDevice(const StreamResources& kit,
               CUstream stream,
               const KernelOptions& kernel_options,
               const GemmOptions& options,
               const WorkspacePlan& plan,
               const DeviceBytes& workspace);

  // Events that a call of this plan uses.
  static int NumEvents(const WorkspacePlan& plan, const StreamLanes& lanes) {
    return 2 + plan.num_events + lanes.num_product_lanes();
  }

  CopyMethod copies() const { return CopyWayOf(tuning_); }
  CUstream stream(Lane lane) const { return lanes_ ? lanes_->stream(lane) : stream_; }

  // The communication lane comes behind all others.
  void Gather();
  // XLA's stream comes behind the communication lane; Gather comes before it. Where
  // enqueueing failed buffer way, too: a capture does not end with lanes that are left over.
  void Join();

  int num_product_lanes() const override {
    return lanes_ ? lanes_->num_product_lanes() : 1;
  }
  Tensor Allocate(DType dtype, int64_t batch, int64_t rows, int64_t features) override;
  void Multiply(Lane lane,
                std::vector<GemmProblem> problems,
                const Step& step) override;
  void Copy(Lane lane, const Rows& from, std::byte* to, int64_t to_stride) override;
  void Sum(Lane lane,
           std::span<const ConstMatrix> parts,
           int64_t rows,
           int64_t columns,
           const Matrix& out) override;
  EventId Record(Lane lane) override;
  void Await(Lane lane, EventId event) override;

 private:
  void Divide(const WorkspacePlan& plan, const DeviceBytes& workspace);

  const StreamResources kit_;
  const CUstream stream_;  // XLA's
  StreamLanes* const lanes_;
  const KernelOptions tuning_;
  const GemmOptions options_;
  std::vector<GemmWorkspace> scratch_;  // [lane]
  DeviceBytes free_;                    // of the workspace
  int num_events_ = 0;                  // of the lanes, that the call has used
};

}  // namespace jax_ub
