// Enqueues a rank's call on the streams of its GPU. Functions return before the work is
// done. All of it can be captured in a graph and replayed: epochs are counted on the
// device, not on the host.
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

// What StreamDevice needs to enqueue work on a GPU. All members outlive the call.
struct StreamResources {
  const Driver& driver;
  const SumKernels& sums;
  CudaGemm& gemm;
};

CopyMethod CopyMethodOf(const KernelOptions& kernel_options);

// Enqueues the work of one call on the streams of a GPU. During the lifetime of the
// object, the GPU's CUDA context is current, and no other call uses the same lanes.
class StreamDevice : public CudaDevice {
 public:
  // Enqueues work on `lanes`, after the work that XLA's stream, `stream`, already has.
  // If `lanes` is null, the call does not communicate, and all work runs on `stream`.
  // `workspace` must be large enough for `plan`.
  StreamDevice(const StreamResources& resources,
               CUstream stream,
               StreamLanes* lanes,
               const KernelOptions& kernel_options,
               const GemmOptions& options,
               const WorkspacePlan& plan,
               const DeviceBytes& workspace);

  // Returns how many events a call with this workspace plan records.
  static int NumEvents(const WorkspacePlan& plan, const StreamLanes& lanes) {
    return 2 + plan.num_events + lanes.num_product_lanes();
  }

  CopyMethod copies() const { return CopyMethodOf(kernel_options_); }
  CUstream stream(Lane lane) const { return lanes_ ? lanes_->stream(lane) : stream_; }

  // Makes the communication lane (a stream) wait for the streams of all GEMM lanes.
  void Gather();
  // Makes XLA's stream wait for the communication lane, after Gather. Required even if
  // enqueueing has failed: otherwise a graph capture cannot end.
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
