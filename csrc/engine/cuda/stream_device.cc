#include "engine/cuda/stream_device.h"

#include <algorithm>
#include <stdexcept>
#include <string>
#include <utility>

#include "platform/error.h"

namespace jax_ub {

namespace {

SumPart PartOf(const ConstMatrix& matrix) {
  return {AddressOf(matrix.data), matrix.row_stride, matrix.dtype};
}

}  // namespace

CopyMethod CopyMethodOf(const KernelOptions& kernel_options) {
  return {kernel_options.use_ce, kernel_options.num_sm, kernel_options.cga_size};
}

StreamDevice::StreamDevice(const StreamResources& resources,
                           CUstream stream,
                           StreamLanes* lanes,
                           const KernelOptions& kernel_options,
                           const GemmOptions& options,
                           const WorkspacePlan& plan,
                           const DeviceBytes& workspace)
    : resources_(resources),
      stream_(stream),
      lanes_(lanes),
      kernel_options_(kernel_options),
      options_(options) {
  Divide(plan, workspace);
  if (lanes_ == nullptr) return;
  const Driver& driver = resources.driver;
  const CUevent begin = lanes_->event(0);
  Check(driver, driver.EventRecord(begin, stream), "cuEventRecord");
  for (Lane lane = 0; lane <= lanes_->num_product_lanes(); ++lane) {
    Check(driver, driver.StreamWaitEvent(lanes_->stream(lane), begin, 0),
          "cuStreamWaitEvent");
  }
  num_events_ = 1;
}

void StreamDevice::Divide(const WorkspacePlan& plan, const DeviceBytes& workspace) {
  if (workspace.size_bytes < plan.size_bytes()) {
    throw ShapeError("jax_ub: the workspace has " +
                     std::to_string(workspace.size_bytes) + " bytes, expected " +
                     std::to_string(plan.size_bytes()));
  }
  CUdeviceptr next = WorkspacePlan::Align(workspace.data);
  for (const int64_t bytes : plan.scratch_bytes) {
    scratch_.push_back({next, bytes});
    next += bytes;
  }
  free_ = {next, plan.tensor_bytes};
}

void StreamDevice::Gather() {
  for (Lane lane = 1; lane <= num_product_lanes(); ++lane) {
    Await(kCommunicationLane, Record(lane));
  }
}

void StreamDevice::Join() {
  if (lanes_ == nullptr) return;
  const Driver& driver = resources_.driver;
  Check(driver,
        driver.StreamWaitEvent(stream_, lanes_->event(Record(kCommunicationLane)), 0),
        "cuStreamWaitEvent");
}

Tensor StreamDevice::Allocate(DType dtype,
                              int64_t batch,
                              int64_t rows,
                              int64_t features) {
  Tensor tensor{dtype, batch, rows, features, nullptr};
  const int64_t bytes = WorkspacePlan::Align(tensor.size_bytes());
  if (bytes > free_.size_bytes) {
    throw std::logic_error("jax_ub: the call allocates more than was planned");
  }
  tensor.data = reinterpret_cast<std::byte*>(free_.data);
  free_.data += bytes;
  free_.size_bytes -= bytes;
  return tensor;
}

void StreamDevice::Multiply(Lane lane,
                            std::vector<GemmProblem> problems,
                            const Step& step) {
  for (const GemmProblem& problem : problems) {
    resources_.gemm.Enqueue(problem, options_, scratch_[lane], stream(lane));
  }
}

void StreamDevice::Copy(Lane lane, const Rows& from, std::byte* to, int64_t to_stride) {
  const CopyParams params = {.from = AddressOf(from.data),
                             .to = AddressOf(to),
                             .num_rows = from.num_rows,
                             .row_bytes = from.row_bytes,
                             .from_stride = from.stride_bytes,
                             .to_stride = to_stride,
                             .unit_bytes = 0};
  EnqueueCopy(resources_.driver, resources_.sums, stream(lane), params, copies());
}

void StreamDevice::Sum(Lane lane,
                       std::span<const ConstMatrix> parts,
                       int64_t rows,
                       int64_t columns,
                       const Matrix& out) {
  SumParams params = {};
  params.num_parts = static_cast<uint32_t>(parts.size());
  params.rows = rows;
  params.columns = columns;
  params.out = PartOf({out.data, out.row_stride, out.dtype});
  for (size_t i = 0; i < parts.size(); ++i) params.parts[i] = PartOf(parts[i]);
  resources_.sums.Sum(stream(lane), params);
}

EventId StreamDevice::Record(Lane lane) {
  if (lanes_ == nullptr) return kNoEvent;
  const Driver& driver = resources_.driver;
  Check(driver, driver.EventRecord(lanes_->event(num_events_), stream(lane)),
        "cuEventRecord");
  return num_events_++;
}

void StreamDevice::Await(Lane lane, EventId event) {
  if (event == kNoEvent) return;
  const Driver& driver = resources_.driver;
  Check(driver, driver.StreamWaitEvent(stream(lane), lanes_->event(event), 0),
        "cuStreamWaitEvent");
}

}  // namespace jax_ub
