// A device that executes nothing. The executor runs on it to determine the resources
// that a call needs.
#pragma once

#include <functional>
#include <vector>

#include "engine/cuda/cuda_device.h"
#include "engine/executor.h"

namespace jax_ub {

class DryRunDevice : public CudaDevice {
 public:
  // Called for every GEMM, in the order in which a device would enqueue the GEMMs.
  using Visit = std::function<void(Lane, const GemmProblem&)>;

  explicit DryRunDevice(const CallAttributes& attributes, Visit visit = nullptr);

  const WorkspacePlan& plan() const { return plan_; }

  int num_product_lanes() const override { return num_product_lanes_; }
  Tensor Allocate(DType dtype, int64_t batch, int64_t rows, int64_t features) override;
  void Multiply(Lane lane,
                std::vector<GemmProblem> problems,
                const Step& step) override;
  void Copy(Lane lane, const Rows& from, std::byte* to, int64_t to_stride) override {}
  void Sum(Lane lane,
           std::span<const ConstMatrix> parts,
           int64_t rows,
           int64_t columns,
           const Matrix& out) override {}
  EventId Record(Lane lane) override { return plan_.num_events++; }
  void Await(Lane lane, EventId event) override {}

 private:
  const int num_product_lanes_;
  const bool transposes_fp8_;
  const Visit visit_;
  WorkspacePlan plan_;
};

// A transport that does nothing, for dry runs and for ranks without peers.
class NullTransport : public Transport {
 public:
  NullTransport(int rank, int num_ranks, int64_t slot_bytes)
      : rank_(rank), num_ranks_(num_ranks), slot_bytes_(slot_bytes) {}

  int rank() const override { return rank_; }
  int num_ranks() const override { return num_ranks_; }
  // Returns a fake address of a slot (receive buffer). The address is never accessed.
  const std::byte* slot(int index) const override;
  void Write(int peer, int slot, const Rows& rows) override {}
  void Signal(int peer, int slot) override {}
  void Wait(int peer, int slot, const WaitReason& reason) override {}
  void Release(int slot) override {}
  void WaitFree(int peer, int slot, const WaitReason& reason) override {}
  void EndCall() override {}

 private:
  const int rank_;
  const int num_ranks_;
  const int64_t slot_bytes_;
};

// The slots (receive buffers) and the workspace that a rank's call needs.
struct CallPlan {
  SlotRequirements slots;
  WorkspacePlan workspace;
};
// Computes the plan of a rank's call, and passes each GEMM of the rank to `visit`.
// Tensors of `call` without data get distinct fake addresses.
CallPlan PlanCall(const CallAttributes& attributes,
                  const RankCall& call,
                  int rank,
                  const DryRunDevice::Visit& visit = nullptr);

// Returns the workspace that the call needs if ReduceByMulticast executes it instead of
// its schedule. All ranks need the same workspace.
WorkspacePlan PlanByMulticast(const CallAttributes& attributes,
                              const RankCall& call,
                              const SlotRequirements& slots,
                              const DryRunDevice::Visit& visit);

// Throws UnsupportedError if GPUs do not support the call. They do not support the
// method "direct" and groups of more than kMaxRanks ranks.
void CheckRunsOnCuda(const CallAttributes& attributes);

}  // namespace jax_ub
