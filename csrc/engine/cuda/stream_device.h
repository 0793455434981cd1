// Enqueues a rank's call on the streams of its GPU. Functions return before the work is
// done. All work can be captured in a graph and replayed, because epochs are counted on
// the device instead of the host.
//
//   XLA's stream ---begin-----------------------------------------------end--->
//   lane 0            +--put--signal--wait--put--signal--wait---------+--+
//   lane 1            +--GEMM-------------------GEMM------------------+
//   lane 2            +-----------------GEMM--------------------------+
#pragma once

#include <cuda.h>

#include <vector>

#include "engine/cuda/cuda_device.h"
#include "engine/cuda/stream_lanes.h"
#include "gemm/cuda/cuda_gemm.h"
#include "platform/cuda/driver.h"
#include "reduce/cuda/sum_kernels.h"

namespace jax_ub {

// The objects that StreamDevice needs to enqueue work on a GPU. They must outlive the
// call.
struct StreamResources {
  const Driver& driver;
  const SumKernels& sums;
  CudaGemm& gemm;
};

CopyMethod CopyMethodOf(const KernelOptions& kernel_options);

// Enqueues the work of one call on the streams of a GPU. During the lifetime of a
// StreamDevice, the GPU's CUDA context must be current, and no other call may use the
// same lanes.
class StreamDevice : public CudaDevice {
 public:
  // Enqueues work on `lanes`, after the work that is already enqueued on XLA's stream,
  // `stream`. If `lanes` is null, the call does not communicate, and all work runs on
  // `stream`. `workspace` must be large enough for `plan`.
  StreamDevice(const StreamResources& resources,
               CUstream stream,
               StreamLanes* lanes,
               const KernelOptions& kernel_options,
               const GemmOptions& options,
               const WorkspacePlan& plan,
               const DeviceBytes& workspace);

  // Returns the number of events that a call with this workspace plan records.
  static int NumEvents(const WorkspacePlan& plan, const StreamLanes& lanes) {
    return 2 + plan.num_events + lanes.num_product_lanes();
  }

  CopyMethod copies() const { return CopyMethodOf(kernel_options_); }
  CUstream stream(Lane lane) const { return lanes_ ? lanes_->stream(lane) : stream_; }

  // Makes the communication lane (a stream) wait for the streams of all GEMM lanes.
  void Gather();
  // Makes XLA's stream wait for the communication lane. Must be called after Gather,
  // even if enqueueing has failed, because a graph capture cannot end otherwise.
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

  const StreamResources resources_;
  const CUstream stream_;  // XLA's stream
  StreamLanes* const lanes_;
  const KernelOptions kernel_options_;
  const GemmOptions options_;
  std::vector<GemmWorkspace> scratch_;  // [lane]
  DeviceBytes free_;                    // unused tensor memory of the workspace
  int num_events_ = 0;                  // events of the lanes that the call has used
};

}  // namespace jax_ub
